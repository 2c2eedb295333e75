"""System calls that fail: the n-th of a kind, in any code."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Final, NamedTuple

__all__ = ["CALLS", "INTERRUPT", "Failing", "Fault"]

CALLS: Final[dict[str, tuple[ModuleType, str]]] = {
    "open": (os, "open"),
    "posix_fallocate": (os, "posix_fallocate"),
    "fchmod": (os, "fchmod"),
    "fstat": (os, "fstat"),
    "link": (os, "link"),
    "unlink": (os, "unlink"),
    "fcntl": (fcntl, "fcntl"),
    "mmap": (mmap, "mmap"),
    "madvise": (mmap, "mmap"),
}
"""Those that may fail, and where Python has them: what is called through these modules fails, and nothing else."""

INTERRUPT: Final = 0
"""In the place of an error's number: the call raises KeyboardInterrupt, as one that Ctrl+C comes into."""


class Fault(NamedTuple):
    """A call that fails.

    Attributes
    ----------
    call : str
        One of :data:`CALLS`.
    after : int
        How many of its kind go well before.
    error : int
        The number of the error, of :mod:`errno`; or :data:`INTERRUPT`.
    times : int
        How many fail then.
    """

    call: str
    after: int
    error: int
    times: int = 1

    def raised(self) -> BaseException:
        """Return the call's error."""
        if self.error == INTERRUPT:
            return KeyboardInterrupt()
        return OSError(self.error, os.strerror(self.error))


class Failing:
    """A context manager in which a fault happens, in this process.

    Parameters
    ----------
    fault : Fault
        The call that fails, and how.

    Attributes
    ----------
    has_happened : bool
        Whether a call has failed.

    Raises
    ------
    ValueError
        No such call can be made to fail.
    """

    def __init__(self, fault: Fault) -> None:
        if fault.call not in CALLS:
            raise ValueError(f"call {fault.call!r} cannot be made to fail; expected one of {', '.join(CALLS)}")
        self._fault = fault
        self._left = fault.after
        self._module, self._name = CALLS[fault.call]
        self._real: Any = None
        self.has_happened = False

    def __enter__(self) -> Failing:
        self._real = getattr(self._module, self._name)  # maybe another fault's
        setattr(self._module, self._name, self._mapping() if self._fault.call == "madvise" else self._wrapped())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        setattr(self._module, self._name, self._real)

    def _wrapped(self) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._pass()
            return self._real(*arguments, **named)

        return call

    def _mapping(self) -> type[mmap.mmap]:
        failing = self

        class Mapping(mmap.mmap):
            def madvise(self, *arguments: int) -> None:
                failing._pass()
                super().madvise(*arguments)

        return Mapping

    def _pass(self) -> None:
        self._left -= 1
        if -self._fault.times <= self._left < 0:
            self.has_happened = True
            raise self._fault.raised()
