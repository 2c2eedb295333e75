"""The packages that the client half needs in addition to numpy, and the error that names the extra to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["name_missing_library"]


@contextlib.contextmanager
def name_missing_library() -> Iterator[None]:
    """Raise a ModuleNotFoundError that names the packages to install, if an import fails."""
    try:
        yield
    except (ModuleNotFoundError, RuntimeError) as error:  # tritonclient raises RuntimeError for its missing libraries
        raise ModuleNotFoundError(
            f"shm_backend_utils.client lacks a library ({error}); run pip install 'CHECKOUT_OR_WHEEL[client]'",
            name=getattr(error, "name", None),
        ) from None
