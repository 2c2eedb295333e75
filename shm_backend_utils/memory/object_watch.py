"""A watch on /dev/shm: whether anybody has opened an object there, or let go of one, since it was last looked at.

Triton opens and maps an object when it registers it, and unmaps it when it unregisters it
(``src/shared_memory_manager.cc``). The kernel tells of both (inotify(7)) before those system calls return: a mapping
holds the open file, which is closed with its last mapping. So the news is there before the server has answered.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import termios
from typing import Final

from ..forks import forsake_in_children
from .shared_file import DEV_SHM

__all__ = ["ObjectWatch"]

_IN_OPEN: Final = 0x20  # linux/inotify.h
_IN_CLOSE_WRITE: Final = 0x08
_MOST: Final = 1 << 16  # bytes of events that are read at once
_NONE: Final = bytes(4)  # an int


class ObjectWatch:
    """Tells of everything that is opened in /dev/shm, or closed by somebody who could write. Not thread-safe.

    It costs one of the user's inotify instances and a file descriptor; the kernel keeps 16,384 events, and then tells
    that it lost some.

    Raises
    ------
    OSError
        The user has no inotify instances left, or this kernel has no inotify.
    """

    def __init__(self) -> None:
        self._fd = -1
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _last_error()
        if libc.inotify_add_watch(self._fd, os.fsencode(DEV_SHM), _IN_OPEN | _IN_CLOSE_WRITE) < 0:
            error = _last_error()
            self.close()
            raise error
        forsake_in_children(self)

    def has_news(self) -> bool:
        """Return whether anything happened since the last look; a closed watch cannot say that nothing did.

        Less than a microsecond. Events beyond one read are news at the next look, too.
        """
        if self._fd < 0:
            return True
        if fcntl.ioctl(self._fd, termios.FIONREAD, _NONE) == _NONE:
            return False
        os.read(self._fd, _MOST)
        return True

    def forsake(self) -> None:
        """Let go of the parent's events in a forked child, which would take them from it."""
        self.close()

    def close(self) -> None:
        """Close the descriptor. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
