"""The peer of a connection, with its user and rights; and threads that close descriptors, which may take long."""

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
_MOST_BYTES: Final = 1024  # the most that Python's getsockopt reads; with more groups, only the effective one counts
_ROOT: Final = 0
_BY_GROUP: Final = 0o060
_BY_OTHERS: Final = 0o006

MOST_WAITING: Final = 256
"""When this many sockets and descriptors wait to be closed, callers should open no more."""

MOST_THREADS: Final = 4
"""The most threads of one closer. If all of them hang, the closer closes nothing else."""

_LINGER_S: Final = 1.0  # how long an idle thread waits for more work


class Peer(NamedTuple):
    """A connected process' effective user and all of its groups, as they were when it connected."""

    user_id: int
    group_ids: frozenset[int]

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Ask the kernel for the peer of a connection, without reading anything that the peer has sent."""
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user_id, group_id = _CREDENTIALS.unpack(answer)
        try:
            further = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        except OSError:
            further = b""
        return cls(user_id, frozenset({group_id, *(number for (number,) in _GROUP_ID.iter_unpack(further))}))

    def may_open(self, access: Access) -> bool:
        """Return whether ``access`` lets this peer open a region of this process for reading and writing."""
        if self.user_id in (_ROOT, os.geteuid()):
            return True
        group_id = os.getegid() if access.group_id is None else access.group_id
        needed = _BY_GROUP if group_id in self.group_ids else _BY_OTHERS
        return access.mode & needed == needed


def accept_descriptors(connection: socket.socket, *, is_wanted: bool) -> bool:
    """Let peers send descriptors, or forbid it; return False before Linux 6.16, which cannot forbid it."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, is_wanted)
    except OSError:
        return False
    return True


class Closer:
    """Closes sockets and descriptors in a few threads, which end when they have no more work.

    Closing the last descriptor of a TCP socket, a FUSE file, or a Unix socket that holds one of these may take many
    seconds.
    """

    def __init__(self) -> None:
        self._begin()
        call_after_fork(self)

    def _begin(self) -> None:
        self._left: deque[socket.socket | Descriptor] = deque()  # also those that a thread is closing just now
        self._begun: list[socket.socket | Descriptor] = []  # those that a thread is closing
        self._choosing = threading.Lock()  # only the closing threads take it, so close() never waits
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # finalizers may put into it
        self._places = [threading.Lock() for _ in range(MOST_THREADS)]  # each running thread holds one

    def close(self, what: socket.socket | Descriptor) -> None:
        """Let a thread close an object soon, and return at once; the caller must not use the object any more."""
        self._have_thread()  # first: after an interrupt here, the caller still owns the object
        self._left.append(what)
        self._wakes.put(None)
        self._have_thread()  # again: the last thread may have ended just before the append

    @property
    def waiting(self) -> int:
        """The number of objects that are not closed yet."""
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Whether so many objects wait to be closed that callers should open no more."""
        return self.waiting >= MOST_WAITING

    def after_fork(self) -> None:
        """Close the copies in a forked child at once. This cannot take long: the parent has the same files open."""
        left = self._left
        self._begin()
        for each in left:
            _close(each)

    def _have_thread(self) -> None:
        """Start one more thread if fewer run than there are objects to close, up to ``MOST_THREADS``."""
        if sum(place.locked() for place in self._places) < min(MOST_THREADS, max(self.waiting, 1)):
            # If the system refuses a new thread, the object waits until the next call.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, name="shm-closer", daemon=True).start()

    def _run(self) -> None:
        """Take a free place, close every waiting object, and end after some time without a new one."""
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
