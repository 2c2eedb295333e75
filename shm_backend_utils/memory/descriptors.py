"""File descriptors that no interrupt leaks, access rights to their files, and the error if no descriptor is left."""

from __future__ import annotations

import errno
import os
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ..errors import CallerError, NoSharedMemoryError, translate
from ..process import call_after_fork

__all__ = [
    "NO_DESCRIPTORS",
    "PRIVATE",
    "Access",
    "Descriptor",
    "NoDescriptorsError",
    "no_descriptors",
    "translate_os_errors",
]

NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errno values for a lack of file descriptors."""


class Descriptor:
    """An open file descriptor: closed with its object, except after ``outlive_object``, and at once in a forked child.

    A signal handler may raise between two steps of the interpreter. If ``open_it`` is a function in C,
    ``list.extend`` and ``map`` open and store the descriptor in one step.
    """

    __slots__ = ("__weakref__", "_held", "_outlives")

    def __init__(self, open_it: Callable[..., int], *arguments: Any) -> None:
        self._outlives = False
        self._held: list[int] = []
        call_after_fork(self)
        self._held.extend(map(open_it, *zip(arguments, strict=True)))

    def fileno(self) -> int:
        """Return the descriptor's number, or -1 once it is closed."""
        return self._held[0] if self._held else -1

    def reopened(self) -> Descriptor:
        """Open the file again, for locks of its own; O_NONBLOCK, as a peer's file lease could block the call."""
        return Descriptor(os.open, f"/proc/self/fd/{self.fileno()}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)

    def duplicate(self) -> Descriptor:
        """Return another descriptor of the same open file description, for files that cannot be opened again."""
        return Descriptor(os.dup, self.fileno())

    def outlive_object(self) -> None:
        """Keep the descriptor open until the process ends, even without this object: others may still rely on it."""
        self._outlives = True

    def close(self) -> None:
        """Close the descriptor. Twice is fine."""
        deque(map(os.close, map(self._held.pop, range(len(self._held)))), maxlen=0)

    after_fork = close

    def __del__(self, os_close: Any = os.close, drain: Any = deque) -> None:
        held = () if getattr(self, "_outlives", True) else getattr(self, "_held", ())
        drain(map(os_close, map(held.pop, range(len(held)))) if held else (), maxlen=0)


@dataclass(frozen=True, slots=True)
class Access:
    """The users who may open a region: permission bits, and their group (None: this process' own)."""

    mode: int = 0o600
    group_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, int) or self.mode & ~0o066 != 0o600:
            raise CallerError(f"mode is {self.mode!r}; expected for example 0o600, or 0o660 with a group")

    def give_to(self, fd: int) -> None:
        """Let only these users open a file of this process, whatever the umask is."""
        os.fchmod(fd, self.mode)
        if self.group_id is not None:
            os.fchown(fd, -1, self.group_id)


PRIVATE: Final = Access()
"""This user alone."""


class NoDescriptorsError(NoSharedMemoryError):
    """This process has no file descriptor left."""


def no_descriptors(needed: str) -> NoDescriptorsError:
    """Return the error for a lack of descriptors; ``needed`` says how many were needed, and for which purpose."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NoDescriptorsError(
        f"{needed}, and this process has none left of {most}; release results sooner, or raise the limit (ulimit -n)"
    )


def translate_os_errors(
    needed: str = "a shared-memory region takes two file descriptors",
    failed: str = "shared memory cannot be opened here: {}; run `shm-backend-utils doctor`",
) -> translate[OSError]:
    """Turn OSError into NoSharedMemoryError where memory is made or opened: a context manager, or a decorator."""

    def meaning(error: OSError) -> NoSharedMemoryError | None:
        if error.errno in NO_DESCRIPTORS:
            return no_descriptors(needed)
        if error.errno is None or isinstance(error, FileExistsError):
            return None  # raised by this library, or about the key that the caller chose
        return NoSharedMemoryError(failed.format(os.strerror(error.errno)))

    return translate(OSError, meaning)
