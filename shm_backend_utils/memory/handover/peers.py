"""Peers of a connection: their users and rights, and threads for descriptors that may be slow to close."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections import deque
from typing import Final, NamedTuple

from ...process import call_after_fork
from ..descriptors import Access, Descriptor

__all__ = ["MOST_THREADS", "MOST_WAITING", "Closer", "Peer", "accept_descriptors"]

_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group
_SO_PASSRIGHTS: Final = 83  # Linux 6.16; the socket module has no name for it
_SO_PEERGROUPS: Final = 59  # the socket module has no name for it
_GROUP_ID: Final = struct.Struct("I")
_MOST_BYTES: Final = 1024  # the most that Python reads by getsockopt(2); with more groups, only the first one counts
_ROOT: Final = 0
_BY_GROUP: Final = 0o060
_BY_OTHERS: Final = 0o006

MOST_WAITING: Final = 256
"""When this many wait to be closed, nothing new should be opened."""

MOST_THREADS: Final = 4
"""The most threads that close. If all of them hang, nothing else is closed."""

_LINGER_S: Final = 1.0  # how long an idle thread waits for more work


class Peer(NamedTuple):
    """A connected process' effective user and all of its groups, as they were when it connected."""

    user_id: int
    group_ids: frozenset[int]

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Ask the kernel; nothing that the peer has sent is read."""
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user_id, group_id = _CREDENTIALS.unpack(answer)
        try:
            further = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        except OSError:
            further = b""
        return cls(user_id, frozenset({group_id, *(number for (number,) in _GROUP_ID.iter_unpack(further))}))

    def may_open(self, access: Access) -> bool:
        """Return whether this user may open a region of this process for reading and writing."""
        if self.user_id in (_ROOT, os.geteuid()):
            return True
        group_id = os.getegid() if access.group_id is None else access.group_id
        needed = _BY_GROUP if group_id in self.group_ids else _BY_OTHERS
        return access.mode & needed == needed


def accept_descriptors(connection: socket.socket, *, is_wanted: bool) -> bool:
    """Let a peer send descriptors, or not; return False before Linux 6.16, where every peer can."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, is_wanted)
    except OSError:
        return False
    return True


class Closer:
    """Closes sockets and descriptors, in a few threads that live while they have work.

    Closing the last descriptor of a TCP socket, a FUSE file, or a Unix socket that holds one of these may take many
    seconds.
    """

    def __init__(self) -> None:
        self._begin()
        call_after_fork(self)

    def _begin(self) -> None:
        self._left: deque[socket.socket | Descriptor] = deque()  # also those being closed: a fork has them open
        self._begun: list[socket.socket | Descriptor] = []  # those that a thread is closing
        self._choosing = threading.Lock()  # for the threads only
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # finalizers may put into it
        self._places = [threading.Lock() for _ in range(MOST_THREADS)]  # each running thread holds one

    def close(self, what: socket.socket | Descriptor) -> None:
        """Have it closed soon, without waiting; do not use it from here on."""
        self._have_thread()  # first, so that an interrupt finds it either here or still with the caller
        self._left.append(what)
        self._wakes.put(None)
        self._have_thread()  # the thread from before may just have ended

    @property
    def waiting(self) -> int:
        """How many are not closed yet."""
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Whether so many wait that nothing new should be opened."""
        return self.waiting >= MOST_WAITING

    def after_fork(self) -> None:
        """Close a forked child's copies at once. That is quick: the parent has them open, too."""
        left = self._left
        self._begin()
        for each in left:
            _close(each)

    def _have_thread(self) -> None:
        """Start one more thread if all are at work, up to ``MOST_THREADS``."""
        if sum(place.locked() for place in self._places) < min(MOST_THREADS, max(self.waiting, 1)):
            # If no thread can be started, the work waits for the next call.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, name="shm-closer", daemon=True).start()

    def _run(self) -> None:
        """Close all that waits, if a place is free; work that comes after the last look starts another thread."""
        while place := next((each for each in self._places if each.acquire(blocking=False)), None):
            with contextlib.suppress(queue.Empty):
                while True:
                    while what := self._choose():
                        _close(what)
                        with self._choosing:
                            self._left.remove(what)
                            self._begun.remove(what)
                    self._wakes.get(timeout=_LINGER_S)
            place.release()
            if self.waiting <= len(self._begun):
                return

    def _choose(self) -> socket.socket | Descriptor | None:
        """Return the object that has waited longest for a thread; None if none waits."""
        with self._choosing:
            what = next((each for each in list(self._left) if each not in self._begun), None)
            if what is not None:
                self._begun.append(what)
            return what


def _close(what: socket.socket | Descriptor) -> None:
    with contextlib.suppress(Exception):  # no caller could do anything about it
        what.close()
