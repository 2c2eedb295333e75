"""Requests that are served as one batch; strings that cannot be read; and the buffers in which rows are gathered."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.model import BatchCall, ShmSession
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of, outputs_of
from tests.unit.modes.conftest import FP32, MakeClient, Open, batched, carrier_of
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

ROW_BYTES = 16


def rows_side_by_side(client: Client, counts: list[int]) -> list[InferenceRequest]:
    requests, at, total = [], client.data, sum(counts) * ROW_BYTES
    for slot, count in enumerate(counts):
        shape, size = (count, 4), count * ROW_BYTES
        np.ndarray(shape, np.float32, client.region.bytes(), at)[...] = slot + 1
        said = Table({"X": InputSpan(FP32, shape, 0, at, size)}, {"Y": OutputSpan(0, at + total, size)})
        requests.append(delivered(client.begin(said, slot), ["Y"], carrier_of(count)))
        at += size
    return requests


def double_batch(seen: list[Any]) -> Callable[[BatchCall], None]:
    def infer(batch: BatchCall) -> None:
        x = batch.input("X")
        y = batch.output("Y", x.shape[1:], x.dtype)
        seen.append((batch.size, batch.gathered_bytes, x.path, y.path))
        np.multiply(x.numpy(), 2, out=y.numpy())

    return infer


@pytest.mark.parametrize("step", [1, -1])
def test_rows_that_follow_one_another_are_one_view(open_session: Open, make_client: MakeClient, step: int) -> None:
    client, seen = make_client(slots=3), []  # type: ignore[var-annotated]
    requests = rows_side_by_side(client, [1, 2, 3])[::step]
    responses = batched(open_session).serve_batch(requests, double_batch(seen))
    assert [response.error() for response in responses] == [None] * 3
    assert seen == [(6, 0, "direct", "direct")]
    for slot in range(3):
        assert client.output("Y", slot).tolist() == [[2 * slot + 2] * 4] * (slot + 1)
        assert client.is_over(slot)


def test_a_batch_of_one_request_copies_nothing(open_session: Open, make_client: MakeClient) -> None:
    client, copied = make_client(slots=2), []
    x = np.full((2, 4), 3, np.float32)
    requests = [
        client.request({"X": x}, {"Y": 32}, delivered=carrier_of(2)),
        client.request({"X": x}, {"Y": 31}, 1, delivered=carrier_of(2)),
        delivered({}, ["Y"], {"X": x}),
    ]

    def infer(batch: BatchCall) -> None:
        (call,) = batch.calls
        found = batch.input("X")
        y = batch.output("Y", (4,), np.float32)
        assert np.shares_memory(found.numpy(), call.input("X").numpy())
        assert np.shares_memory(y.numpy(), call.outputs["Y"].view.numpy())
        np.multiply(found.numpy(), 2, out=y.numpy())
        batch.scatter()
        copied.append(batch.gathered_bytes)

    session = batched(open_session)
    responses = [response for request in requests for response in session.serve_batch([request], infer)]
    assert [response.error() for response in responses] == [None] * 3
    assert copied == [0] * 3


def test_nothing_of_a_batch_is_kept(open_session: Open) -> None:
    session = batched(open_session)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(15):
        client, seen = Client(slots=2), []  # type: ignore[var-annotated]
        session.serve_batch(rows_side_by_side(client, [1, 1]), double_batch(seen))
        assert seen[0][1] == 0
        client.close()
    resolver = session._open_context().resolver
    resolver.sweep()
    assert resolver.registry.mapped() == (0, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_request_that_lacks_an_input_fails_alone(open_session: Open, make_client: MakeClient) -> None:
    inputs = [tensor("X", dims=[-1]), tensor("W", dims=[-1]), tensor("SHM", "UINT8")]
    session = open_session(inputs, [tensor("Y", dims=[-1])], max_batch_size=8)
    client = make_client(slots=4)
    sizes: list[int] = []
    both = {"X": np.ones((1, 4), np.float32), "W": np.full((1, 4), 2, np.float32)}
    given = [both, {"X": both["X"]}, both, {}]
    requests = [
        client.request(each, {"Y": 16}, slot, delivered=carrier_of(1) if each else None)
        for slot, each in enumerate(given)
    ]

    def add(batch: BatchCall) -> None:
        sizes.append(batch.size)
        batch.put("Y", batch.input("X").numpy() + batch.input("W").numpy())

    responses = session.serve_batch(requests, add)
    assert sorted(sizes) == [1, 2]
    assert message_of(responses[1]).startswith("shm:missing: the request has no input 'W'")
    assert message_of(responses[3]).startswith("shm:missing: ")
    assert [responses[slot].error() for slot in (0, 2)] == [None, None]
    assert [client.output("Y", slot).tolist() for slot in (0, 2)] == [[[3] * 4]] * 2
    assert all(client.is_over(slot) for slot in range(4))


def rows_apart(client: Client) -> list[InferenceRequest]:
    return [
        client.request({"X": np.full((1, 4), slot + 1, np.float32)}, {"Y": 16}, slot, delivered=carrier_of(1))
        for slot in range(2)
    ]


def put_instead(batch: BatchCall) -> None:
    x = batch.input("X").numpy()
    batch.output("Y", x.shape[1:], x.dtype).numpy()[...] = -1
    batch.put("Y", x * 2)


def put_the_same(batch: BatchCall) -> None:
    x = batch.input("X").numpy()
    y = batch.output("Y", x.shape[1:], x.dtype)
    np.multiply(x, 2, out=y.numpy())
    batch.put("Y", y)


def put_for_each(batch: BatchCall) -> None:
    x = batch.input("X").numpy()
    batch.output("Y", x.shape[1:], x.dtype).numpy()[...] = -1
    for call, rows in zip(batch.calls, batch.rows, strict=True):
        call.put("Y", x[rows.start : rows.stop] * 2)


@pytest.mark.parametrize("debug", ["false", "true"])
@pytest.mark.parametrize("infer", [put_instead, put_the_same, put_for_each])
@pytest.mark.parametrize("requests_of", [rows_apart, lambda client: rows_side_by_side(client, [1, 1])])
def test_what_is_put_after_memory_was_asked_for_is_the_output_of_a_batch(
    open_session: Open, requests_of: Any, infer: Callable[[BatchCall], None], debug: str, make_client: MakeClient
) -> None:
    client = make_client(slots=2)
    responses = batched(open_session, parameters={"SHM_DEBUG": debug}).serve_batch(requests_of(client), infer)
    assert [response.error() for response in responses] == [None, None]
    assert [client.output("Y", slot).tolist() for slot in range(2)] == [[[2] * 4], [[4] * 4]]


SLOTS = 3
ROOM = 256
LIES = {
    "a length beyond the end": b"\xff\xff\xff\x7f" + bytes(4),
    "a length that is one too large": b"\x05\x00\x00\x00good",
    "more elements than there are": b"\x04\x00\x00\x00four",
}


@pytest.fixture
def session(open_session: Open) -> ShmSession:
    inputs = [tensor("TEXT", "STRING", [-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("WORDS", "STRING", [-1])], max_batch_size=8)


def packed(*words: str) -> bytes:
    return Strings.of("TEXT", np.array(words, object)).packed()


def write(client: Client, slot: int, data: bytes) -> int:
    at = client.data + slot * 2 * ROOM
    client.region.bytes()[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at


def request_of(client: Client, slot: int, data: bytes, count: int = 2) -> InferenceRequest:
    at = write(client, slot, data)
    size = max(len(data), 4 * count)
    said = Table({"TEXT": InputSpan(BYTES, (1, count), 0, at, size)}, {"WORDS": OutputSpan(0, at + ROOM, ROOM)})
    return delivered(client.begin(said, slot), ["WORDS"], carrier_of(1))


def words_of(client: Client, slot: int) -> list[bytes]:
    place = client.places(slot)["WORDS"]
    data = client.region.bytes()[place.offset : place.offset + place.byte_size]
    return list(Strings.encoded_as("WORDS", data, place.shape))


def shout(batch: BatchCall) -> None:
    words = batch.input("TEXT").numpy()
    batch.put("WORDS", np.array([[word.upper() for word in row] for row in words], object))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liar", range(3))
def test_lying_strings_fail_their_own_request(session: ShmSession, client: Client, lie: str, liar: int) -> None:
    seen: list[int] = []

    def infer(batch: BatchCall) -> None:
        seen.append(batch.size)
        shout(batch)

    requests = [request_of(client, slot, LIES[lie] if slot == liar else packed("a", "bc")) for slot in range(3)]
    responses = session.serve_batch(requests, infer)
    assert seen == [2]
    assert message_of(responses[liar]).startswith("shm:tensor: tensor 'TEXT' has ")
    assert error_code(responses[liar]) == "INVALID_ARG"
    for slot in {0, 1, 2} - {liar}:
        assert responses[slot].error() is None
        assert words_of(client, slot) == [b"A", b"BC"]
    assert all(client.is_over(slot) for slot in range(3))


@pytest.mark.parametrize("count", [1, 3])
def test_strings_that_change_meanwhile_change_nothing(session: ShmSession, client: Client, count: int) -> None:
    def infer(batch: BatchCall) -> None:
        for slot in range(count):
            write(client, slot, LIES["a length beyond the end"])
        assert [call.input("TEXT").strings()[:] for call in batch.calls] == [[b"a", b"bc"]] * count
        shout(batch)

    responses = session.serve_batch([request_of(client, slot, packed("a", "bc")) for slot in range(count)], infer)
    assert [response.error() for response in responses] == [None] * count
    assert words_of(client, 0) == [b"A", b"BC"]


def test_strings_that_lie_side_by_side_are_those_that_were_checked(session: ShmSession, client: Client) -> None:
    data, requests = packed("a", "bc"), []
    memory = client.region.bytes()[client.data : client.data + 2 * len(data)]
    for slot in range(2):
        at = slot * len(data)
        memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
        said = Table({"TEXT": InputSpan(BYTES, (1, 2), 0, client.data + at, len(data))}, {})
        requests.append(delivered(client.begin(said, slot), ["WORDS"], carrier_of(1)))
    found: list[Any] = []

    def infer(batch: BatchCall) -> None:
        memory[:] = 255
        found.extend(batch.input("TEXT").numpy().tolist())
        shout(batch)

    assert [response.error() for response in session.serve_batch(requests, infer)] == [None, None]
    assert found == [[b"a", b"bc"]] * 2


@pytest.fixture
def gathering(open_session: Open) -> ShmSession:
    inputs = [tensor("X", dims=[-1]), tensor("N", "INT64", dims=[-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("Y", dims=[-1]), tensor("M", "INT64", dims=[-1])], max_batch_size=8)


def plain_requests(rng: random.Random, count: int, most_columns: int) -> list[tuple[InferenceRequest, Any]]:
    found = []
    for _ in range(count):
        shape = rng.randint(1, 3), rng.randint(1, most_columns)
        x = np.full(shape, rng.random(), np.float32)
        found.append((delivered({}, ["Y", "M"], {"X": x, "N": x.astype(np.int64)}), x))
    return found


def double(batch: BatchCall) -> None:
    x, n = batch.input("X"), batch.input("N")
    np.multiply(x.numpy(), 2, out=batch.output("Y", x.shape[1:], x.dtype).numpy())
    batch.output("M", n.shape[1:], n.dtype).numpy()[...] = n.numpy()


def test_rows_that_a_batch_passes_on_are_not_overwritten_by_the_next_batch(gathering: ShmSession) -> None:
    given = [np.full((1, width), value, np.float32) for value, width in enumerate((4, 4, 5, 5))]
    responses = gathering.serve_batch(
        [delivered({}, ["Y"], {"X": x}) for x in given], lambda batch: batch.put("Y", batch.input("X"))
    )
    assert [outputs_of(response)["Y"].tolist() for response in responses] == [x.tolist() for x in given]


@pytest.mark.parametrize("most_columns", [5, 100])
def test_batches_get_their_own_rows_and_leave_few_buffers(gathering: ShmSession, most_columns: int) -> None:
    rng, most_requests = random.Random(1), 5
    for _ in range(200):
        asked = plain_requests(rng, rng.randint(2, most_requests), most_columns)
        responses = gathering.serve_batch([request for request, _ in asked], double)
        for (_, x), response in zip(asked, responses, strict=True):
            assert response.error() is None
            assert outputs_of(response)["Y"].tolist() == (2 * x).tolist()
    largest, kept = 3 * most_requests * most_columns * 8, gathering._buffers._buffers
    assert len(kept) <= 4 * most_requests
    assert max(buffer.nbytes for buffer, _ in kept.values()) <= largest + largest // 4


def test_a_buffer_is_used_again_by_what_fits_until_the_session_closes(gathering: ShmSession) -> None:
    same, kept = [request for request, _ in plain_requests(random.Random(1), 1, 50)] * 3, gathering._buffers._buffers
    gathering.serve_batch(same, double)
    before = [id(buffer) for buffer, _ in kept.values()]
    for _ in range(20):
        gathering.serve_batch(same, double)
    assert before
    assert [id(buffer) for buffer, _ in kept.values()] == before
    gathering.close()
    assert kept == {}
