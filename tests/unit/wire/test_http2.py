"""Our framing of gRPC's calls against the ``h2`` library, however the bytes are cut, and against broken peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.client.transports.conversation import Unanswered
from shm_backend_utils.client.transports.grpc.http2 import Http2, Reply, Request
from shm_backend_utils.client.transports.grpc.transport import head_of
from tests.unit.wire.peers import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    SETTINGS,
    TRAILERS,
    H2Peer,
    block,
    frame,
    message,
)

HEAD = head_of("ModelInfer", "localhost:8001")
OK = frame(1, END_HEADERS, 1, block(HEADERS)) + frame(0, 0, 1, message(b"answer"))
END = frame(1, END_HEADERS | END_STREAM, 1, block(TRAILERS))
SPLITS = st.lists(st.integers(1, 40), max_size=30)


def sent_by(conversation: Http2) -> bytes:
    sent = b"".join(conversation.out)
    conversation.out.clear()
    return sent


def talk(conversation: Http2, peer: H2Peer, sizes: list[int]) -> None:
    to_client = peer.connection.data_to_send()
    left = iter(sizes)
    while True:
        to_client += peer.receive(sent_by(conversation))
        if not to_client and not conversation.out:
            return
        while to_client:
            size = next(left, len(to_client))
            conversation.receive(to_client[:size])
            to_client = to_client[size:]


@given(
    calls=st.lists(st.tuples(st.integers(0, 150_000), st.integers(0, 150_000)), min_size=1, max_size=4),
    status=st.integers(0, 16),
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40),
    padding=st.integers(0, 255),
    sizes=SPLITS,
)
def test_sizes_of_calls(calls: list[tuple[int, int]], status: int, text: str, padding: int, sizes: list[int]) -> None:
    heard: dict[int, bytes] = {}

    def answer(peer: H2Peer, stream: int, received: bytes) -> None:
        heard[stream] = received
        trailers = [("grpc-status", str(status)), ("grpc-message", percent_encoded(text)), ("x-more", "1" * 300)]
        peer.send(stream, message(bytes(calls[stream // 2][1])), trailers, padding)

    conversation, peer = Http2(), H2Peer(answer)
    numbers = [conversation.begin(Request(HEAD, bytes([7]) * size), 12.5) for size, _ in calls]
    talk(conversation, peer, sizes)
    told = text.strip(" ")  # h2 sends no spaces around a value
    assert numbers == list(range(1, 2 * len(calls), 2))
    assert [heard[number] for number in numbers] == [message(bytes([7]) * size) for size, _ in calls]
    for number, (_, size) in zip(numbers, calls, strict=True):
        assert conversation.ended.pop(number) == (Reply(status, told, b"") if status else Reply(0, "", bytes(size)))
    assert not conversation.failure
    assert conversation.has_room
    assert peer.headers[1] == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/inference.GRPCInferenceService/ModelInfer",
        ":authority": "localhost:8001",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-timeout": "12500000u",
    }


def percent_encoded(text: str) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte != 37 else f"%{byte:02X}" for byte in text.encode())


@given(
    st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 10), st.integers(0, 255), st.integers(0, 4)), max_size=8),
    SPLITS,
)
def test_whatever_comes_every_call_ends_with_the_connection(frames: list[Any], sizes: list[int]) -> None:
    conversation = begun()
    data = b"".join(frame(kind, flags, stream, payload) for payload, kind, flags, stream in frames) + OK + END
    for size in sizes:
        conversation.receive(data[:size] or b"")
        data = data[size:]
    conversation.receive(b"")
    assert isinstance(conversation.ended[1], Reply | Unanswered)
    assert conversation.failure


@given(answers=st.lists(st.binary(max_size=30_000), max_size=5), sizes=SPLITS)
def test_answers_are_taken_one_by_one(answers: list[bytes], sizes: list[int]) -> None:
    taken: list[bytes] = []
    conversation, peer = Http2(), H2Peer(lambda peer, stream, _: peer.send(stream, b"".join(map(message, answers))))
    conversation.begin(Request(HEAD, b"", taken.append), 1)
    talk(conversation, peer, sizes)
    assert (taken, conversation.ended) == (answers, {1: Reply(0, "", b"")})


def test_answers_before_an_error_are_taken_and_one_to_a_cancelled_call_is_nobodys() -> None:
    taken: list[bytes] = []
    conversation = begun(take=taken.append)
    conversation.receive(OK + frame(0, 0, 1, message(b"") + message(b"more")[:-1]) + END)
    assert taken == [b"answer", b""]
    assert conversation.ended == {1: Reply(13, "the message ends after 8 bytes", b"")}
    conversation = begun(2)
    conversation.cancel(1)
    assert sent_by(conversation) == frame(3, 0, 1, bytes((0, 0, 0, 8)))
    conversation.receive(of_stream(1) + of_stream(3))
    assert conversation.ended == {3: Reply(0, "", b"answer")}


def begun(calls: int = 1, take: Callable[[bytes], object] | None = None) -> Http2:
    conversation = Http2()
    conversation.receive(SETTINGS)
    for _ in range(calls):
        conversation.begin(Request(HEAD, b"?", take), 1)
    sent_by(conversation)
    return conversation


BROKEN = {
    "a frame beyond the limit": frame(0, 0, 1, bytes(16385)),
    "headers without end": frame(1, 0, 1, b"\x00" * 16000) + frame(9, 0, 1, b"\x00" * 16000) * 5,
    "a continuation of nothing": frame(9, END_HEADERS, 1),
    "headers that are interrupted": frame(1, 0, 1, block(HEADERS)) + frame(6, 0, 0, bytes(8)),
    "headers of another stream": frame(1, 0, 1, block(HEADERS)) + frame(9, END_HEADERS, 3),
    "headers that are no HPACK": frame(1, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
    "headers in a table": frame(1, END_HEADERS, 1, b"\xbe"),
    "more padding than data": frame(0, PADDED, 1, b"\x09abc"),
    "padding without a length": frame(0, PADDED, 1),
    "a push": frame(5, END_HEADERS, 1, bytes(4)),
    "a stream that nobody began": frame(0, 0, 7, b"x"),
    "a stream of the server's": frame(1, END_HEADERS, 2, block(HEADERS)),
    "data for the connection": frame(0, 0, 0, b"x"),
    "settings for a stream": frame(4, 0, 1),
    "half a setting": frame(4, 0, 0, bytes(5)),
    "a window that is too large": frame(4, 0, 0, bytes((0, 4, 255, 255, 255, 255))),
    "frames that are too small": frame(4, 0, 0, bytes((0, 5, 0, 0, 0, 1))),
    "a window that overflows": frame(8, 0, 0, bytes((127, 255, 255, 255))),
    "a window that grows by nothing": frame(8, 0, 1, bytes(4)),
    "half a window": frame(8, 0, 0, bytes(2)),
    "half a reset": frame(3, 0, 1, bytes(2)),
    "half a goodbye": frame(7, 0, 0, bytes(2)),
    "the end": b"",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_peer_that_does_not_keep_to_http2_loses_the_connection(data: bytes) -> None:
    conversation = begun()
    conversation.receive(data)
    assert conversation.failure
    assert conversation.ended[1] == Unanswered(conversation.failure, may_have_begun=True)


STRANGE = {
    "HTTP/1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Failed parsing HTTP/2"),
    "a page": (b"<!DOCTYPE HTML PUBLIC>", "Failed parsing HTTP/2"),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x46" + bytes(9), "it speaks TLS"),
    "another frame first": (frame(6, 0, 0, bytes(8)), "Failed parsing HTTP/2"),
    "nothing": (b"", "failed to connect"),
}


@pytest.mark.parametrize(("data", "reason"), STRANGE.values(), ids=STRANGE)
def test_what_does_not_begin_as_http2_does_is_told(data: bytes, reason: str) -> None:
    conversation = Http2()
    conversation.receive(data)
    assert not conversation.is_ready
    assert reason in conversation.failure


def headers(*more: tuple[str, str], flags: int = END_HEADERS) -> bytes:
    return frame(1, flags, 1, block([*more]))


WRONG: dict[str, tuple[bytes, int, str]] = {
    "a gateway's error": (headers((":status", "503")), 14, "Received http2 header with status: 503"),
    "a status that is no number": (headers((":status", "many")), 2, "status: many"),
    "another content type": (headers((":status", "200"), ("content-type", "text/html")), 2, "'text/html'"),
    "headers alone": (headers(*HEADERS, *TRAILERS, flags=5), 13, "ends after 0 bytes"),
    "an error in headers alone": (headers(*HEADERS, ("grpc-status", "5"), flags=5), 5, ""),
    "no status": (OK + headers(("x", "y"), flags=5), 2, ""),
    "data before headers": (frame(0, 0, 1, b"x"), 13, "before the headers"),
    "headers twice": (OK + headers(*HEADERS, ("x", "y")), 13, "twice"),
    "an end without trailers": (headers(*HEADERS) + frame(0, END_STREAM, 1, message(b"a")), 13, "without a status"),
    "a message longer than it says": (headers(*HEADERS) + frame(0, 0, 1, message(b"") + b"x") + END, 13, "after 6"),
    "one without end": (headers(*HEADERS) + frame(0, 0, 1, message(bytes(9)) + bytes(9000)) * 2, 13, "longer"),
    "a message shorter than it says": (headers(*HEADERS) + frame(0, 0, 1, message(b"ab")[:-1]) + END, 13, "after 6"),
    "a compressed message": (headers(*HEADERS) + frame(0, 0, 1, b"\x01" + message(b"a")[1:]) + END, 13, "compressed"),
    "a reset": (frame(3, 0, 1, bytes((0, 0, 0, 8))), 1, "RST_STREAM with error code 8"),
    "calm": (frame(3, 0, 1, bytes((0, 0, 0, 11))), 8, "RST_STREAM with error code 11"),
}


@pytest.mark.parametrize(("data", "status", "details"), WRONG.values(), ids=WRONG)
def test_an_answer_that_is_not_grpcs_fails_its_call_alone(data: bytes, status: int, details: str) -> None:
    conversation = begun(2)
    conversation.receive(data)
    reply = conversation.ended.pop(1)
    assert isinstance(reply, Reply)
    assert (reply.status, reply.message) == (status, b"")
    assert details in reply.details
    conversation.receive(of_stream(3))
    assert conversation.ended == {3: Reply(0, "", b"answer")}


def of_stream(number: int) -> bytes:
    return (
        frame(1, END_HEADERS, number, block(HEADERS))
        + frame(0, 0, number, message(b"answer"))
        + frame(1, END_HEADERS | END_STREAM, number, block(TRAILERS))
    )


ODD = {
    "an early hint": headers((":status", "103")) + of_stream(1),
    "headers in pieces": frame(1, 0, 1, block(HEADERS)[:2])
    + frame(9, END_HEADERS, 1, block(HEADERS)[2:])
    + of_stream(1)[9 + len(block(HEADERS)) :],
    "padding and priority": frame(1, END_HEADERS | PADDED | 32, 1, b"\x03" + bytes(5) + block(HEADERS) + bytes(3))
    + frame(0, PADDED, 1, b"\x02" + message(b"answer") + bytes(2))
    + END,
    "a frame of a kind that nobody knows": frame(200, 255, 1, b"?") + of_stream(1),
    "data in drops": headers(*HEADERS) + b"".join(frame(0, 0, 1, bytes([each])) for each in message(b"answer")) + END,
    "empty data": headers(*HEADERS) + frame(0, 0, 1) + frame(0, 0, 1, message(b"answer")) + frame(0, 0, 1) + END,
    "a reset after the end": of_stream(1) + frame(3, 0, 1, bytes(4)),
    "data after the end": of_stream(1) + frame(0, 0, 1, b"more"),
    "priority": frame(2, 0, 1, bytes(5)) + of_stream(1),
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_what_the_rules_allow_is_read(data: bytes) -> None:
    for size in (1, 7, len(data)):
        conversation = begun()
        for at in range(0, len(data), size):
            conversation.receive(data[at : at + size])
        assert conversation.ended == {1: Reply(0, "", b"answer")}
        assert not conversation.failure


def test_calls_that_a_goodbye_leaves_out_or_that_are_refused_have_not_begun() -> None:
    conversation = begun(3)
    conversation.receive(frame(7, 0, 0, bytes((0, 0, 0, 3, 0, 0, 0, 0))))
    assert conversation.ended.pop(5) == Unanswered("the server takes no more calls: GOAWAY", may_have_begun=False)
    assert not conversation.has_room
    conversation.receive(of_stream(3) + of_stream(1))
    assert sorted(conversation.ended) == [1, 3]
    conversation = begun()
    conversation.receive(frame(3, 0, 1, bytes((0, 0, 0, 7))))
    assert conversation.ended == {1: Unanswered("Received RST_STREAM with error code 7", may_have_begun=False)}
    for end in (frame(3, 0, 1, bytes((0, 0, 0, 7))), frame(7, 0, 0, bytes(8))):  # of a call whose answer has begun
        conversation = begun()
        conversation.receive(headers(*HEADERS) + end)
        ended = conversation.ended[1]
        assert isinstance(ended, Unanswered)
        assert ended.may_have_begun


def test_questions_of_the_peer_are_answered_and_what_it_may_send_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = begun()
    conversation.receive(frame(6, 0, 0, b"12345678") + SETTINGS + frame(6, 1, 0, bytes(8)) + frame(4, 1, 0))
    assert sent_by(conversation) == frame(6, 1, 0, b"12345678") + frame(4, 1, 0)
    monkeypatch.setattr(Http2, "receive_window", 71_999)
    conversation = begun(2)
    data = message(bytes(60_000))[:12_000]
    conversation.receive(headers(*HEADERS) + frame(0, 0, 1, data) + frame(0, 0, 1, bytes(12_000)) * 2)
    grown = (36_000).to_bytes(4, "big")
    assert sent_by(conversation) == frame(8, 0, 0, grown) + frame(8, 0, 1, grown)
    conversation = begun()
    padded = [bytes([200]) + each + bytes(200) for each in (data, bytes(12_000), bytes(12_000))]
    conversation.receive(headers(*HEADERS) + b"".join(frame(0, 8, 1, each) for each in padded))
    grown = (3 * 12_201).to_bytes(4, "big")
    assert sent_by(conversation) == frame(8, 0, 0, grown) + frame(8, 0, 1, grown)


def test_no_more_calls_at_once_than_the_peer_takes() -> None:
    conversation = begun()
    conversation.receive(frame(4, 0, 0, bytes((0, 3, 0, 0, 0, 2))))
    rooms = [conversation.has_room]
    conversation.begin(Request(HEAD, b""), 1)
    rooms.append(conversation.has_room)
    conversation.receive(of_stream(1))
    rooms.append(conversation.has_room)
    conversation._next = 2**31 - 1  # the last one
    assert conversation.begin(Request(HEAD, b""), 1) == 2**31 - 1
    conversation.receive(of_stream(2**31 - 1) + of_stream(3))
    rooms.append(conversation.has_room)
    assert rooms == [True, False, True, False]


@pytest.mark.parametrize("timeout_s", [1e-6, 0.1, 99.9, 100.0, 86400.0, 1e12])
def test_a_timeout_is_never_shorter_than_its_callers(timeout_s: float) -> None:
    heard: Callable[[H2Peer, int, bytes], None] = lambda peer, stream, _: peer.send(stream, message(b""))  # noqa: E731
    conversation, peer = Http2(), H2Peer(heard)
    conversation.begin(Request(HEAD, b""), timeout_s)
    talk(conversation, peer, [])
    told = peer.headers[1]["grpc-timeout"]
    assert len(told) <= 9
    assert float(told[:-1]) * {"u": 1e-6, "S": 1.0}[told[-1]] >= min(timeout_s, 99_999_999) - 1e-9
