"""Calls of gRPC with one request, over HTTP/2 without TLS: RFC 9113, and gRPC's ``PROTOCOL-HTTP2.md``. No I/O.

grpcio takes twice the time. This code recognizes headers that equal an earlier answer's; ``hpack`` reads all others.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple
from urllib.parse import unquote

import hpack

from ..conversation import Conversation, Unanswered

__all__ = ["Http2", "Reply", "Request"]

# Kinds of frames, their flags, and settings
_DATA, _HEADERS, _, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_OF_CONNECTIONS: Final = frozenset({_SETTINGS, _PING, _GOAWAY})
_OF_STREAMS: Final = frozenset({_DATA, _HEADERS, _RST_STREAM, _CONTINUATION})
_END_STREAM, _ACK, _END_HEADERS, _LAST_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x5, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = range(1, 6)

_FRAME: Final = struct.Struct(">LBL")  # length << 8 | kind; flags; stream
_SETTING: Final = struct.Struct(">HL")
_NUMBER: Final = struct.Struct(">L")
_PREFIX: Final = struct.Struct(">BL")  # of a message: whether it is compressed, and its length

_MOST: Final = 2**31 - 1  # the largest window and stream number
_FIRST_WINDOW: Final = 2**16 - 1
_FRAME_BYTES: Final = 2**14  # the largest frame, unless the receiver allows more
_HEADER_BYTES: Final = 2**16
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MOST_S: Final = 10**8 - 1  # the longest timeout
_TLS: Final = (b"\x15\x03", b"\x16\x03")  # how TLS's records begin: alerts, and handshakes

# gRPC's status codes, and those for HTTP's status and for the code of RST_STREAM
_OK, _UNKNOWN, _INTERNAL = 0, 2, 13
_OF_HTTP: Final = {"400": 13, "401": 16, "403": 7, "404": 12, "429": 14, "502": 14, "503": 14, "504": 14}
_REFUSED_STREAM, _CANCEL = 7, 8
_OF_RESETS: Final = {_CANCEL: 1, 11: 8, 12: 7}


class Request(NamedTuple):
    head: bytes  # the headers in HPACK without a dynamic table, up to the timeout's value
    message: bytes
    take: Callable[[bytes], object] | None = None  # takes each answer of a call that may have several


class Reply(NamedTuple):
    """An answer: gRPC's status, text, and message, which is empty if the status is not 0, or if ``take`` has got it."""

    status: int
    details: str
    message: bytes


class _BrokenError(Exception):
    """The server violates HTTP/2."""


class _Stream:
    """A call that has no answer yet."""

    unsent = memoryview(b"")
    has_headers = False
    received = refill = 0

    def __init__(self, window: int, take: Callable[[bytes], object] | None) -> None:
        self.take = take
        self.window = window  # bytes that may be sent
        self.data: list[bytes] = []
        self.wanted = _PREFIX.size - 1 if take else _FRAME_BYTES  # when more bytes have come, read a message's length


class Http2(Conversation):
    """One connection, as its client. Calls may overlap."""

    is_shared = True
    receive_window: ClassVar[int] = _MOST
    """How many bytes of an answer the server may send before the client reads any."""

    def __init__(self) -> None:
        settings = ((_HEADER_TABLE_SIZE, 0), (_ENABLE_PUSH, 0), (_INITIAL_WINDOW_SIZE, self.receive_window))
        self.out: list[bytes | memoryview] = [
            _PREFACE,
            _frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings)),
            _frame(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_MOST - _FIRST_WINDOW)),
        ]
        self.ended: dict[int, Reply | Unanswered] = {}
        self.is_ready = False
        self.failure = ""
        self._is_going = False  # the server takes no more calls
        self._streams: dict[int, _Stream] = {}
        self._next = 1
        self._rest = b""  # the bytes of an incomplete frame
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, and the bytes of its headers so far
        self._decoder = hpack.Decoder(max_header_list_size=_HEADER_BYTES)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._usual_headers: bytes | None = None  # an earlier answer's
        self._usual_trailers: bytes | None = None
        self._refill = 0
        self._window = self._first_window = _FIRST_WINDOW  # of the connection now, and of each stream at first
        self._frame_bytes = _FRAME_BYTES
        self._most_streams = _MOST
        self._has_unsent = False

    @property
    def has_room(self) -> bool:
        return not (self.failure or self._is_going) and len(self._streams) < self._most_streams and self._next <= _MOST

    def begin(self, request: Request, timeout_s: float) -> int:
        head, message, take = request
        number = self._next
        self._next = number + 2
        stream = self._streams[number] = _Stream(self._first_window, take)
        seconds = _MOST_S if take else min(timeout_s, _MOST_S)  # the caller of a stream limits the wait for each answer
        left = math.ceil(seconds * 1e6)
        timeout = b"%du" % left if left < 10**8 else b"%dS" % math.ceil(seconds)
        head = b"%b%c%b" % (head, len(timeout), timeout)
        begin = _FRAME.pack(len(head) << 8 | _HEADERS, _END_HEADERS, number)
        prefix = _PREFIX.pack(0, len(message))
        size = len(message) + _PREFIX.size
        if size <= min(self._frame_bytes, self._window, self._first_window):
            self._window -= size
            self.out.append(b"".join((begin, head, _FRAME.pack(size << 8, _END_STREAM, number), prefix, message)))
        else:
            self.out += (begin, head)
            stream.unsent = memoryview(prefix + message)
            self._send_more()
        return number

    def cancel(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self.out.append(_frame(_RST_STREAM, 0, number, _NUMBER.pack(_CANCEL)))
        self.ended.pop(number, None)

    def receive(self, data: bytes) -> None:
        if not data:
            self._end("Socket closed" if self.is_ready else "failed to connect: the server hung up")
            return
        try:
            self._rest = self._receive_frames(self._rest + data)
            if self._refill > self.receive_window // 2:
                self._refill_windows()
        except (_BrokenError, struct.error, IndexError, ValueError, hpack.HPACKError) as error:
            is_tls = not self.is_ready and (self._rest + data).startswith(_TLS)
            self._end("failed to connect: it speaks TLS" if is_tls else f"Failed parsing HTTP/2: {error}")

    def _receive_frames(self, data: bytes) -> bytes:
        """Handle all complete frames; return the bytes of the frame that is incomplete."""
        streams, read, head, at, size = self._streams, _FRAME.unpack_from, _FRAME.size, 0, len(data)
        while (begin := at + head) <= size:
            word, flags, number = read(data, at)
            length = word >> 8
            end = begin + length
            if length > _FRAME_BYTES:
                raise _BrokenError(f"a frame of {length} bytes")
            if end > size:
                break
            payload = data[begin:end]
            at = end
            kind = word & 0xFF
            stream = streams.get(number)
            if stream is None:
                self._receive_frame(kind, flags, number, payload)
            elif kind == _DATA and not flags and stream.has_headers:
                self._add(number, stream, payload)
            elif flags == _END_HEADERS and payload == self._usual_headers and kind == _HEADERS:
                stream.has_headers = True
            elif flags == _LAST_HEADERS and payload == self._usual_trailers and kind == _HEADERS:
                self._answer(number, stream, _OK, "")
            else:
                self._receive_frame(kind, flags, number, payload)
        return data[at:]

    def _receive_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame of any kind and any stream."""
        if not self.is_ready and (kind != _SETTINGS or flags & _ACK):
            raise _BrokenError("it does not begin as HTTP/2 does")
        if (self._block is None) is (kind == _CONTINUATION):
            raise _BrokenError("headers without an end or a beginning")
        is_unknown = number >= self._next or (number and number % 2 == 0)
        if is_unknown or kind in (_OF_CONNECTIONS if number else _OF_STREAMS) or kind == _PUSH_PROMISE:
            raise _BrokenError(f"a frame of kind {kind} for stream {number}")
        if kind == _WINDOW_UPDATE:
            self._receive_window(number, *_NUMBER.unpack(payload))
        elif kind == _DATA:
            self._receive_data(flags, number, payload)
        elif kind == _HEADERS:
            self._block = number, flags, b""
            self._receive_headers(flags, number, _unpadded(flags, payload))
        elif kind == _CONTINUATION:
            self._receive_headers(flags, number, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._receive_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self.out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM:
            self._receive_reset(number, *_NUMBER.unpack(payload))
        elif kind == _GOAWAY:
            self._receive_goodbye(*_NUMBER.unpack_from(payload))

    def _receive_data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        content = _unpadded(flags & ~_PRIORITY, payload)
        self._refill += len(payload) - len(content)
        if stream is not None and stream.has_headers:
            stream.refill += len(payload) - len(content)
            self._add(number, stream, content)
        else:
            self._refill += len(content)
            self._fail(number, "data came before the headers")
        if flags & _END_STREAM:
            self._fail(number, "the answer ends without a status")

    def _add(self, number: int, stream: _Stream, content: bytes) -> None:
        size = len(content)
        self._refill += size
        stream.refill += size
        stream.received += size
        stream.data.append(content)
        if stream.received > stream.wanted:
            self._look_at_length(number, stream)

    def _look_at_length(self, number: int, stream: _Stream) -> None:
        """Read a message's length; pass whole messages to ``take``, or fail a call without it if further bytes come."""
        data, take = b"".join(stream.data), stream.take
        while len(data) > stream.wanted:
            is_compressed, length = _PREFIX.unpack_from(data)
            end = stream.wanted = _PREFIX.size + length
            if is_compressed or (take is None and len(data) > end):
                self._fail(number, f"the message is {'compressed' if is_compressed else 'longer than it says'}")
            if is_compressed or take is None:
                return
            stream.wanted = end - 1
            if len(data) >= end:
                take(data[_PREFIX.size : end])
                data, stream.wanted = data[end:], _PREFIX.size - 1
        stream.data, stream.received = [data], len(data)

    def _refill_windows(self) -> None:
        self.out.append(_frame(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._refill)))
        self._refill = 0
        for number, stream in self._streams.items():
            if stream.refill:
                self.out.append(_frame(_WINDOW_UPDATE, 0, number, _NUMBER.pack(stream.refill)))
                stream.refill = 0

    def _receive_headers(self, flags: int, number: int, fragment: bytes) -> None:
        assert self._block is not None
        begun, first_flags, block = self._block
        block += fragment
        if begun != number or len(block) > _HEADER_BYTES:
            raise _BrokenError("headers of two streams" if begun != number else "headers without end")
        self._block = None if flags & _END_HEADERS else (number, first_flags, block)
        if self._block is not None:
            return
        headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
        stream = self._streams.get(number)
        is_last = first_flags & _END_STREAM
        status, kind = headers.get(":status", "200"), headers.get("content-type", "application/grpc")
        if stream is None or (status.startswith("1") and not is_last):
            return
        if not stream.has_headers and status != "200":
            self._fail(number, f"Received http2 header with status: {status}", _OF_HTTP.get(status, _UNKNOWN))
        elif not stream.has_headers and not kind.startswith("application/grpc"):
            self._fail(number, f"the answer is {kind[:50]!r}, and not application/grpc", _UNKNOWN)
        elif is_last:
            code = int(status_code) if (status_code := headers.get("grpc-status", "")).isdecimal() else _UNKNOWN
            if code == _OK and stream.has_headers:
                self._usual_trailers = block
            details = unquote(headers.get("grpc-message", "")) if status_code else "the answer has no grpc-status"
            self._answer(number, stream, code, details)
        elif stream.has_headers:
            self._fail(number, "headers came twice")
        else:
            self._usual_headers = block
            stream.has_headers = True

    def _receive_settings(self, payload: bytes) -> None:
        self.is_ready = True
        for setting, value in _SETTING.iter_unpack(payload):
            if setting == _MAX_CONCURRENT_STREAMS:
                self._most_streams = value
            elif setting == _MAX_FRAME_SIZE and _FRAME_BYTES <= value < 2**24:
                self._frame_bytes = value
            elif setting == _MAX_FRAME_SIZE or (setting == _INITIAL_WINDOW_SIZE and value > _MOST):
                raise _BrokenError(f"setting {setting} is {value}")
            elif setting == _INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._first_window
                self._first_window = value
        self.out.append(_frame(_SETTINGS, _ACK, 0))
        self._send_more()

    def _receive_window(self, number: int, increment: int) -> None:
        stream = self._streams.get(number)
        if not number:
            self._window += increment
        elif stream is not None:
            stream.window += increment
        if not increment or self._window > _MOST or (stream is not None and stream.window > _MOST):
            raise _BrokenError(f"a window grows by {increment} bytes")
        if self._has_unsent:
            self._send_more()

    def _receive_goodbye(self, last: int) -> None:
        self._is_going = True
        for number in [number for number in self._streams if number > last]:
            may_have_begun = self._streams.pop(number).has_headers
            self.ended[number] = Unanswered("the server takes no more calls: GOAWAY", may_have_begun)

    def _receive_reset(self, number: int, code: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            text = f"Received RST_STREAM with error code {code}"
            reply = Reply(_OF_RESETS.get(code, _INTERNAL), text, b"")
            self.ended[number] = Unanswered(text, stream.has_headers) if code == _REFUSED_STREAM else reply

    def _send_more(self) -> None:
        """Send as much of the unfinished messages as the windows allow."""
        self._has_unsent = False
        for number, stream in self._streams.items():
            while stream.unsent:
                size = min(len(stream.unsent), self._frame_bytes, self._window, stream.window)
                if size <= 0:
                    self._has_unsent = True
                    break
                piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
                self._window -= size
                stream.window -= size
                self.out.append(_frame(_DATA, 0 if stream.unsent else _END_STREAM, number, piece))

    def _answer(self, number: int, stream: _Stream, status: int, details: str) -> None:
        if stream.unsent:  # the server does not want the rest
            self.cancel(number)
        message = b"".join(stream.data)  # no copy if it came in one frame
        size = len(message) - _PREFIX.size
        is_whole = not message if stream.take else size >= 0 and message.startswith(_PREFIX.pack(0, size))
        if status == _OK and not is_whole:
            how = "is compressed" if message.startswith(b"\1") else f"ends after {len(message)} bytes"
            status, details = _INTERNAL, f"the message {how}"
        self._streams.pop(number, None)
        self.ended[number] = Reply(status, details, b"") if status else Reply(_OK, "", message[_PREFIX.size :])

    def _fail(self, number: int, details: str, status: int = _INTERNAL) -> None:
        """End a call whose answer violates gRPC; a later reason does not replace the first."""
        if number in self._streams:
            self.cancel(number)
            self.ended[number] = Reply(status, details, b"")

    def _end(self, reason: str) -> None:
        self.failure = self.failure or reason
        for number in self._streams:
            self.ended[number] = Unanswered(reason, may_have_begun=True)
        self._streams.clear()


def _frame(kind: int, flags: int, number: int, payload: bytes | memoryview = b"") -> bytes:
    return _FRAME.pack(len(payload) << 8 | kind, flags, number) + payload


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority."""
    begin = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
    end = len(payload) - (payload[0] if flags & _PADDED else 0)
    if begin > end:
        raise _BrokenError("more padding than payload")
    return payload[begin:end]
