"""System calls that fail: the n-th of a kind, once, whoever makes it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from hypothesis import strategies as st

CALLS: dict[str, tuple[ModuleType, str]] = {
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
INTERRUPT = 0
ERRORS = (
    errno.ENOSPC,
    errno.ENOMEM,
    errno.EMFILE,
    errno.EINTR,
    errno.EACCES,
    errno.ENOLCK,
    INTERRUPT,
)


class Fault(NamedTuple):
    """The call that fails, how many of its kind go well before, and the number of the error."""

    call: str
    after: int
    error: int

    def raised(self) -> BaseException:
        if self.error == INTERRUPT:
            return KeyboardInterrupt()
        return OSError(self.error, os.strerror(self.error))


BUSY = ("fcntl", errno.EACCES)  # no failure: somebody has the lock
faults = st.builds(Fault, st.sampled_from(sorted(CALLS)), st.integers(0, 4), st.sampled_from(ERRORS)).filter(
    lambda fault: (fault.call, fault.error) != BUSY
)


class Failing:
    """A context manager in which a fault happens.

    Attributes
    ----------
    has_happened : bool
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._left = fault.after
        self._module, self._name = CALLS[fault.call]
        self._real: Any = getattr(self._module, self._name)
        self.has_happened = False

    def __enter__(self) -> Failing:
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
        if self._left == -1:
            self.has_happened = True
            raise self._fault.raised()
