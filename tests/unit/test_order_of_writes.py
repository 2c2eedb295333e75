"""What tells the other side that all is written is written last: the client's generation, the model's `completed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model import Call, StreamCall
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.layout import PAGE_SIZE, SlotRecord
from shm_backend_utils.protocol.spans import Ring, frame_number
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client
from tests.unit.watched import Watched

X = np.arange(4, dtype=np.float32)
BEFORE = b"the table of the request before"
TABLE = b"the table of the latest request"


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=2)
    yield client
    client.close()


def watch_the_client(record: SlotRecord) -> list[tuple[str, int, bytes]]:
    """Note what a client writes, with the generation and the table that the other side would have seen before that."""
    words, contents = record.request.cast("Q"), record.request[8 : 8 + len(TABLE)]
    written: list[tuple[str, int, bytes]] = []

    def noting(what: str) -> Callable[[], None]:
        return lambda: written.append((what, words[0], bytes(contents)))

    changed: Any = record
    changed.table = Watched(record.table, before_write=noting("table"))
    changed.client_words = Watched(record.client_words, before_write=noting("generation"))
    return written


def test_a_client_writes_the_table_and_then_the_generation() -> None:
    region = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE)
    try:
        slot = region.slots[0]
        assert slot.begin(BEFORE) == 1
        written = watch_the_client(slot.record)
        assert slot.begin(TABLE) == 2
        assert written == [("table", 1, BEFORE), ("generation", 1, TABLE)]
        assert slot.record.generation == 2
    finally:
        region.destroy()


def test_a_record_is_begun_by_its_table_and_then_its_generation(client: Client) -> None:
    record = client.region.record(0)
    record.begin(1, BEFORE)
    written = watch_the_client(record)
    record.begin(2, TABLE)
    assert written == [("table", 1, BEFORE), ("generation", 1, TABLE)]


def test_a_client_gives_a_frame_room_by_its_table_and_then_the_word_that_says_so(client: Client) -> None:
    record = client.region.record(0)
    record.give_room(BEFORE, 1)
    seen: list[tuple[str, int, bytes]] = []

    def noting(what: str) -> Callable[[], None]:
        return lambda: seen.append((what, other.room_since, bytes(other.table[: len(TABLE)])))

    other = client.region.record(0)
    changed: Any = record
    changed.table = Watched(record.table, before_write=noting("table"))
    changed.client_words = Watched(record.client_words, before_write=noting("room_since"))
    record.give_room(TABLE, 2)
    assert seen == [("table", 1, BEFORE), ("room_since", 1, TABLE)]


class WatchedModel:
    """What a model writes into a slot's record, with what the client would have seen there before that."""

    def __init__(self, client: Client, slot: int = 0) -> None:
        self.written: list[tuple[str, int, list[str]]] = []
        self._slot = slot
        self._byte_sizes = [client.region.header.byte_size]
        self._record = client.region.record(slot)  # made by the client, and so not watched

    def record(self, buffer: memoryview, slot: int, record_byte_size: int) -> SlotRecord:
        """Return the record of a slot, as a mapping of the model's has it."""
        made: Any = SlotRecord(buffer, slot, record_byte_size)
        if slot == self._slot:
            made.results = Watched(made.results, before_write=lambda: self._note("results"))
            made._model_words = Watched(made._model_words, before_write=lambda: self._note("stamp"))
        return made  # type: ignore[no-any-return]

    def _note(self, what: str) -> None:
        found = results.decode(self._record.copy_results(), self._byte_sizes)
        self.written.append((what, found.completed, [place.name for place in found.outputs]))


def test_a_model_writes_the_results_and_then_that_it_has_completed(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    model = WatchedModel(client)
    monkeypatch.setattr("shm_backend_utils.memory.managed.SlotRecord", model.record)
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:

        def infer(call: Call) -> None:
            call.put("Y", call.input("X"))

        (response,) = session.serve([client.request({"X": X}, {"Y": 16})], infer)
    assert response.error() is None
    started, *finished = model.written
    assert started == ("stamp", 0, [])
    assert finished == [("results", 0, []), ("stamp", 0, ["Y"])]
    assert client.region.record(0).completed == 1


def test_a_frame_of_a_stream_gets_its_number_when_its_results_are_there(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    model = WatchedModel(client, slot=1)
    monkeypatch.setattr("shm_backend_utils.memory.managed.SlotRecord", model.record)
    decoupled = {"decoupled": True}
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy=decoupled) as session:

        def answer(call: StreamCall) -> Iterator[None]:
            call.put("Y", X)
            yield

        session.serve_streams([client.request({"X": X}, {"Y": 16}, ring=Ring(1, 1, 1024))], answer)
    assert model.written == [("results", 0, []), ("stamp", 0, ["Y"])]
    assert client.region.record(1).completed == frame_number(1, 0)
