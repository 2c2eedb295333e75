"""Names at their old import paths, which work with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["moved"]


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the module ``old``: it warns, and returns what ``new`` has in its ``__all__``."""

    def find(name: str) -> Any:
        home = import_module(new)
        if name == "__all__":
            return home.__all__
        if name not in home.__all__:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old}.{name} has moved: import it from {new}", DeprecationWarning, stacklevel=2)
        return getattr(home, name)

    return find
