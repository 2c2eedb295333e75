"""Closing what a stranger may have made slow to close, in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from typing import Final

from ...forks import forsake_in_children
from ..descriptors import Descriptor

__all__ = ["MOST_WAITING", "Closer"]

MOST_WAITING: Final = 256
"""When as many wait to be closed, nothing new should be opened."""

_LINGER_S: Final = 1.0  # a burst needs one thread, and nobody has one for long


class Closer:
    """Closes sockets and descriptors, in a thread that lives while there are any.

    Closing the last descriptor of something may take many seconds: a TCP socket with ``SO_LINGER``, a file of FUSE, and
    a Unix socket that such descriptors lie in, unread. Who sends us descriptors chooses which. So no thread that others
    wait for closes them.
    """

    def __init__(self) -> None:
        self._begin()
        forsake_in_children(self)

    def _begin(self) -> None:
        self._left: deque[socket.socket | Descriptor] = deque()  # what is just being closed, too: a fork has it open
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # finalizers may put into it
        self._at_work = threading.Lock()  # the thread's, while it is there

    def close(self, what: socket.socket | Descriptor) -> None:
        """Have it closed soon. Never waits for that; nobody may use it from here on."""
        self._have_thread()  # first, so that an interrupt finds it either here or still with the caller
        self._left.append(what)
        self._wakes.put(None)
        self._have_thread()  # the one of before may just have ended

    @property
    def waiting(self) -> int:
        """How many are not closed yet."""
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Whether so many wait that nothing new should be opened."""
        return self.waiting >= MOST_WAITING

    def forsake(self) -> None:
        """Close a forked child's copies at once. That is quick: the parent has them open, too."""
        left = self._left
        self._begin()
        for each in left:
            _close(each)

    def _have_thread(self) -> None:
        if not self._at_work.locked():
            # If no thread can be had, all waits for the next call.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, name="shm-closer", daemon=True).start()

    def _run(self) -> None:
        """Close what there is, if no other thread does. What comes after the last look has found nobody at work."""
        while self._at_work.acquire(blocking=False):
            with contextlib.suppress(queue.Empty):
                while True:
                    while self._left:
                        _close(self._left[0])
                        self._left.popleft()
                    self._wakes.get(timeout=_LINGER_S)
            self._at_work.release()
            if not self._left:
                return


def _close(what: socket.socket | Descriptor) -> None:
    with contextlib.suppress(Exception):  # there is nobody who could do anything about it
        what.close()
