"""Requests over HTTP/1.1, and their answers as ``httptools`` parses them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

from httptools import HttpParserError, HttpResponseParser

from ..conversation import Conversation, Unanswered
from .codec import Answer

__all__ = ["Http1", "Request"]

_MOST_HEAD_BYTES: Final = 1 << 16
_FIRST_FINAL_STATUS: Final = 200


class Request(NamedTuple):
    """The bytes of a request, in parts."""

    parts: Sequence[bytes | memoryview]
    most_bytes: int | None  # of the answer's body


class Http1(Conversation):
    """One connection, as its client. It takes one request after another."""

    is_shared = False

    def __init__(self) -> None:
        self.out = []
        self.ended: dict[int, Answer | Unanswered] = {}
        self.is_ready = True
        self.failure = ""
        self._number = 0
        self._is_under_way = False
        self._most_bytes: int | None = None
        self._received = 0
        self._has_head = False
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(
            SimpleNamespace(
                on_message_begin=self._begin_answer,
                on_header=self._headers.__setitem__,
                on_headers_complete=self._end_head,
                on_body=self._body.append,
                on_message_complete=self._end_answer,
            )
        )

    @property
    def has_room(self) -> bool:
        return not self._is_under_way

    def begin(self, request: Request, timeout_s: float) -> int:
        self.out += request.parts
        self._most_bytes = request.most_bytes
        self._is_under_way = True
        self._has_head = False
        self._received = 0
        self._number += 1
        return self._number

    def receive(self, data: bytes) -> None:
        if not data:
            if self._is_under_way and self._has_head and self._body_ends_with_connection():
                self._end_answer()
            self._fail("IncompleteRead" if self._has_head else "Socket closed")
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"{type(error).__name__}: {error}" if self._has_head else f"BadStatusLine: {error}")
        if not self._has_head and self._received > _MOST_HEAD_BYTES:
            self._fail(f"an answer with headers of more than {_MOST_HEAD_BYTES} bytes")
        if self._most_bytes is not None and self._received > self._most_bytes + _MOST_HEAD_BYTES:
            self._fail(f"an answer of more than {self._most_bytes} bytes")

    def cancel(self, number: int) -> None:
        if number == self._number and self._is_under_way:
            self._fail("its user waits no longer")
        self.ended.pop(number, None)

    def _begin_answer(self) -> None:
        if not self._is_under_way:
            self._fail("more came than an answer" if self._number else "BadStatusLine: the server speaks first")
        self._has_head = False
        self._headers.clear()
        self._body.clear()

    def _end_head(self) -> None:
        self._has_head = True

    def _end_answer(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS or not self._is_under_way:
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers.items()}
        self.ended[self._number] = Answer(status, headers, b"".join(self._body))
        self._body.clear()
        self._is_under_way = False
        if not self._parser.should_keep_alive():
            self._fail("the server keeps no connections")

    def _body_ends_with_connection(self) -> bool:
        return not {name.lower() for name in self._headers} & {b"content-length", b"transfer-encoding"}

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        if self._is_under_way:
            self.ended[self._number] = Unanswered(reason, may_have_begun=True)
            self._is_under_way = False
