"""Memory that tells when it is read and written: for tests of the order in which two sides do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Watched"]


class Watched:
    """A part of shared memory in the place of its view; something is called before each read and each write."""

    def __init__(
        self,
        view: memoryview,
        before_read: Callable[[], object] = lambda: None,
        before_write: Callable[[], object] = lambda: None,
    ) -> None:
        self._view = view
        self._before_read = before_read
        self._before_write = before_write

    def __getitem__(self, key: Any) -> Any:
        self._before_read()
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._before_write()
        self._view[key] = value

    def __bytes__(self) -> bytes:
        self._before_read()
        return bytes(self._view)
