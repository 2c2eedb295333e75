"""Functions that belong to a class, and are no methods of its objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["ClassFunction"]


class ClassFunction:
    """A function of a class, as pybind11 makes it: called on an object, it has one argument too many."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        found = partial(self._function, owner) if instance is None else partial(self._function, owner, instance)
        found.__doc__ = self.__doc__
        return found
