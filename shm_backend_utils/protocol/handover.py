"""How a model fetches a sealed region: the key that names its client's socket, one question, one answer. Pure.

A sealed region has no name in a file system. Its key names an abstract Unix socket (unix(7)) of type ``SOCK_SEQPACKET``
on which the client listens, and the region's number there. A model connects and sends the question as one message. The
client answers with one message and the region's descriptor (``SCM_RIGHTS``). Then both close the connection.

::

    question                                        answer
     0  magic    8 bytes   "shmbu-fd"                0  magic   8 bytes  "shmbu-fd"
     8  version  u32       2                         8  status  u32      0 with one descriptor, 1 without any
    12  zero     u32                                12  zero    u32
    16  number   u64       of the region
    24  token    16 bytes  of the region
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from .layout import TOKEN_LENGTH, VERSION

__all__ = [
    "ANSWER_LENGTH",
    "QUESTION_LENGTH",
    "Question",
    "SealedKey",
    "decode_answer",
    "decode_question",
    "encode_answer",
    "encode_question",
    "parse_sealed_key",
]

_PREFIX: Final = "shmbu-fd-"
_KEY: Final = re.compile(rf"{_PREFIX}([0-9a-f]{{32}})-([1-9][0-9]{{0,17}})")
_MAGIC: Final = b"shmbu-fd"
_QUESTION: Final = struct.Struct(f"<8sIIQ{TOKEN_LENGTH}s")
_ANSWER: Final = struct.Struct("<8sII")
_GIVEN: Final = 0
_REFUSED: Final = 1

QUESTION_LENGTH: Final = _QUESTION.size
ANSWER_LENGTH: Final = _ANSWER.size


class SealedKey(NamedTuple):
    """The key of a sealed region."""

    socket: str  # the client's socket: 32 random lowercase hexadecimal digits
    number: int  # of the region at that socket, from 1 on; no number is used twice

    def __str__(self) -> str:
        """Return the key's text in ``shm_slot``."""
        return f"{_PREFIX}{self.socket}-{self.number}"

    @property
    def socket_address(self) -> bytes:
        """The address of the socket: addresses of abstract sockets begin with a zero byte."""
        return f"\0{_PREFIX}{self.socket}".encode()


class Question(NamedTuple):
    """A model's question: the region's number, as in its key, and its token."""

    number: int
    token: bytes


def parse_sealed_key(key: str) -> SealedKey | None:
    """Return the key of a sealed region; None for any other key, which is a name in ``/dev/shm``."""
    found = _KEY.fullmatch(key)
    return None if found is None else SealedKey(found[1], int(found[2]))


def encode_question(question: Question) -> bytes:
    """Return the message that asks a question."""
    return _QUESTION.pack(_MAGIC, VERSION, 0, *question)


def decode_question(message: bytes) -> Question | None:
    """Return the question in a message; None if the message is not a question of this version."""
    if len(message) != QUESTION_LENGTH:
        return None
    magic, version, zero, number, token = _QUESTION.unpack(message)
    return Question(number, token) if (magic, version, zero) == (_MAGIC, VERSION, 0) else None


def encode_answer(*, is_given: bool) -> bytes:
    """Return the answer's message: ``is_given`` is whether a descriptor comes with it."""
    return _ANSWER.pack(_MAGIC, _GIVEN if is_given else _REFUSED, 0)


def decode_answer(message: bytes) -> bool | None:
    """Return whether an answer announces a descriptor; None if the message is not an answer."""
    if len(message) != ANSWER_LENGTH:
        return None
    magic, status, zero = _ANSWER.unpack(message)
    return status == _GIVEN if magic == _MAGIC and status in (_GIVEN, _REFUSED) and zero == 0 else None
