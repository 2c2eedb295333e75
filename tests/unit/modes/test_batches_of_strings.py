"""Strings in batches: who sends some that cannot be read is answered alone, before there is a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.model import BatchCall, ShmSession
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors import strings
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of
from tests.unit.modes.doubling import Open
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

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


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=3)
    yield client
    client.close()


def packed(*words: str) -> bytes:
    return Strings.of("TEXT", np.array(words, object)).packed()


def write(client: Client, slot: int, data: bytes) -> int:
    """Write bytes where a slot's input lies, and return where that is."""
    at = client.data + slot * 2 * ROOM
    client.region.bytes()[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at


def request_of(client: Client, slot: int, data: bytes, count: int = 2) -> InferenceRequest:
    """Return a request with one row of so many strings, in the slot's part of the memory."""
    at = write(client, slot, data)
    size = max(len(data), 4 * count)
    said = Table({"TEXT": InputSpan(BYTES, (1, count), 0, at, size)}, {"WORDS": OutputSpan(0, at + ROOM, ROOM)})
    return delivered(client.begin(said, slot), ["WORDS"], {"SHM": np.empty((1, 0), np.uint8)})


def words_of(client: Client, slot: int) -> list[bytes]:
    place = client.places(slot)["WORDS"]
    data = client.region.bytes()[place.offset : place.offset + place.byte_size]
    return list(Strings.encoded_as("WORDS", data, place.shape))


def shout(batch: BatchCall) -> None:
    words = batch.input("TEXT").numpy()
    batch.put("WORDS", np.array([[word.upper() for word in row] for row in words], object))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liar", range(3))
def test_strings_whose_lengths_lie_fail_their_own_request_alone(
    session: ShmSession, client: Client, lie: str, liar: int
) -> None:
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


def test_strings_are_decoded_once(session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = strings._decode

    def noting(name: str, encoded: Any, count: int) -> list[bytes]:
        decoded.append(count)
        return decode(name, encoded, count)

    monkeypatch.setattr(strings, "_decode", noting)
    responses = session.serve_batch([request_of(client, slot, packed("a", "bc")) for slot in range(3)], shout)
    assert [response.error() for response in responses] == [None] * 3
    assert decoded == [2, 2, 2]


@pytest.mark.parametrize("count", [1, 3])
def test_strings_that_a_client_changes_when_the_batch_is_made_change_nothing(
    session: ShmSession, client: Client, count: int
) -> None:
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
        requests.append(delivered(client.begin(said, slot), ["WORDS"], {"SHM": np.empty((1, 0), np.uint8)}))
    found: list[Any] = []

    def infer(batch: BatchCall) -> None:
        memory[:] = 255
        found.extend(batch.input("TEXT").numpy().tolist())
        shout(batch)

    assert [response.error() for response in session.serve_batch(requests, infer)] == [None, None]
    assert found == [[b"a", b"bc"]] * 2
