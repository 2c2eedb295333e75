"""The packages that the client half needs beside numpy, and the error that names the extra to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["name_missing_library"]


@contextlib.contextmanager
def name_missing_library() -> Iterator[None]:
    """Say in an import's ModuleNotFoundError what to install."""
    try:
        yield
    except (ModuleNotFoundError, RuntimeError) as error:  # the latter is tritonclient's for its own missing libraries
        raise ModuleNotFoundError(
            f"shm_backend_utils.client lacks a library ({error}); run pip install 'CHECKOUT_OR_WHEEL[client]'",
            name=getattr(error, "name", None),
        ) from None
