"""Old import paths of names: they still work, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["moved"]


def moved(old: str, homes: Mapping[str, str]) -> Callable[..., Any]:
    """Return a ``__getattr__`` for the module ``old``: it warns, and returns the name from its module in ``homes``."""

    def find(name: str, stacklevel: int = 2) -> Any:
        if name not in homes:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        home = f"shm_backend_utils.{homes[name]}"
        warnings.warn(f"{old}.{name} has moved: import it from {home}", DeprecationWarning, stacklevel)
        return getattr(import_module(home), name)

    return find
