"""Requests over HTTP/1.1, and their answers as ``httptools`` parses them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from ..conversation import Conversation, Unanswered
from .codec import Answer

__all__ = ["Http1", "Request"]

_MOST_HEAD_BYTES: Final = 1 << 16
_FIRST_FINAL_STATUS: Final = 200


class Request(NamedTuple):
    parts: Sequence[bytes | memoryview]
    most_bytes: float  # of the answer's body


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
        self._most_body: float = 0
        self._most: float = 0  # bytes of an answer: of its headers, until they have come
        self._received = 0
        self._read: dict[bytes, bytes] = {}  # headers, or trailers
        self._headers: dict[bytes, bytes] | None = None  # once all have come
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(
            SimpleNamespace(
                on_message_begin=self._begin_answer,
                on_header=self._read.__setitem__,
                on_headers_complete=self._end_head,
                on_body=self._body.append,
                on_message_complete=self._end_answer,
            )
        )

    @property
    def has_room(self) -> bool:
        return not self._is_under_way

    def begin(self, request: Request, timeout_s: float) -> int:
        parts, self._most_body = request
        self.out += parts
        self._is_under_way = True
        self._headers = None
        self._received = 0
        self._most = _MOST_HEAD_BYTES
        self._number += 1
        return self._number

    def receive(self, data: bytes) -> None:
        if not data:
            headers = self._headers
            if headers is not None and not {b"content-length", b"transfer-encoding"} & {*map(bytes.lower, headers)}:
                self._end_answer()
            self._fail("Socket closed" if headers is None else "IncompleteRead")
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(f"{'BadStatusLine' if self._headers is None else type(error).__name__}: {error}")
        if self._received > self._most:
            self._fail(f"an answer of more than {self._most} bytes")

    def cancel(self, number: int) -> None:
        if number == self._number and self._is_under_way:
            self._fail("its user waits no longer")
        self.ended.pop(number, None)

    def _begin_answer(self) -> None:
        if not self._is_under_way:
            self._fail("more came than an answer" if self._number else "BadStatusLine: the server speaks first")
        self._headers = None
        self._read.clear()
        self._body.clear()

    def _end_head(self) -> None:
        self._headers = self._read.copy()
        self._most = self._most_body + _MOST_HEAD_BYTES

    def _end_answer(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS or not self._is_under_way:
            return
        self.ended[self._number] = Answer(status, self._headers or {}, b"".join(self._body))
        self._body.clear()
        self._is_under_way = False
        if not self._parser.should_keep_alive():
            self._fail("the server keeps no connections")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        if self._is_under_way:
            self.ended[self._number] = Unanswered(reason, may_have_begun=True)
            self._is_under_way = False
