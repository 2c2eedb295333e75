"""Who is at the other end of a connection, and what that user may open: what the kernel would say of a file."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

from ..access import Access

__all__ = ["Peer", "accept_descriptors"]

_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group
_SO_PASSRIGHTS: Final = 83  # Linux 6.16; the socket module has no name for it
_SO_PEERGROUPS: Final = 59  # the socket module has no name for it
_GROUP_ID: Final = struct.Struct("I")
_MOST_BYTES: Final = 1024  # that Python takes from getsockopt(2); who is in more groups counts as in his first alone
_ROOT: Final = 0
_BY_GROUP: Final = 0o060
_BY_OTHERS: Final = 0o006


class Peer(NamedTuple):
    """Who has connected, by the effective user and all of his groups when he did."""

    user_id: int
    group_ids: frozenset[int]

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Ask the kernel, which reads nothing that the peer has sent."""
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
