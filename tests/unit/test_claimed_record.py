"""A request's record, copied once, with the lease; what a model writes, its last word last; and few descriptors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import StaleRequestError, TableError
from shm_backend_utils.memory.descriptors import PRIVATE
from shm_backend_utils.memory.locks import is_slot_in_use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model import Call, ShmSession, StreamCall
from shm_backend_utils.model.mapping.mapped import MappedRegion, MappedSlot
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.layout import PAGE_SIZE, SlotRecord
from shm_backend_utils.protocol.spans import Ring, frame_number
from tests.opened import open_region
from tests.unit.emulated import error_code, log_lines, message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client, Watched

SLOTS = 2
X = np.arange(4, dtype=np.float32)


def slot_of(client: Client) -> MappedSlot:
    return MappedSlot(MappedRegion(open_region(client.region.segment.key, client.region.header.token.hex(), "r")), 0)


def watch(slot: MappedSlot, before_copy: Callable[[], object] = lambda: None) -> list[str]:
    """Have something done before a model reads a record of its client's; return what it reads, as it does."""
    reads: list[str] = []

    def copy() -> None:
        reads.append("record")
        before_copy()

    record: Any = slot.record
    record.request = Watched(record.request, before_read=copy)
    record.client_words = Watched(record.client_words, before_read=lambda: reads.append("generation"))
    return reads


def is_leased(client: Client) -> bool:
    return is_slot_in_use(client.region.segment.fileno(), client.region.record_offset(0))


@pytest.mark.parametrize("outcome", [None, TableError, StaleRequestError])
def test_the_record_is_copied_once_at_most_with_the_lease(client: Client, outcome: type[Exception] | None) -> None:
    slot = slot_of(client)
    said = client.laid_out({"X": X}, {"Y": 16})
    client.begin(said)
    assert not is_leased(client)
    leased: list[bool] = []
    reads = watch(slot, lambda: leased.append(is_leased(client)))
    if outcome is TableError:
        client.region.record(0).table[:16] = bytes(16)
    if outcome is None:
        assert slot.claim(1) == said
        slot.lease.give_back()
    else:
        with pytest.raises(outcome):
            slot.claim(2 if outcome is StaleRequestError else 1)
    assert reads == (["generation"] if outcome is StaleRequestError else ["generation", "record"])
    assert leased == [True] * (len(reads) - 1)


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, SystemExit])
def test_what_breaks_off_the_copy_leaves_no_lease(client: Client, kind: type[BaseException]) -> None:
    """It says nothing of the request, which may be sent again: whoever hears that one is stale does not."""
    slot = slot_of(client)

    def break_off() -> None:
        raise kind

    client.begin(client.laid_out({"X": X}, {"Y": 16}))
    watch(slot, break_off)
    with pytest.raises(kind):
        slot.claim(1)
    assert client.is_free()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    outputs = [tensor("Y"), tensor("MAP", "UINT8", [-1, -1])]
    with session_of(monkeypatch, [tensor("X"), tensor("B", "UINT8")], outputs) as session:
        yield session


def pass_on(call: Call) -> None:
    call.put("Y", call.input("X"))


def test_bytes_of_an_input_are_aligned_as_larger_elements(session: ShmSession, client: Client) -> None:
    given = np.arange(64, dtype=np.uint8)
    request = client.request({"B": given}, {"Y": 16})
    (response,) = session.serve([request], lambda call: call.put("Y", call.input("B").numpy()[1:17].view(np.float32)))
    assert response.error() is None
    np.testing.assert_array_equal(client.output("Y").view(np.uint8), given[1:17])


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16])
def test_shapes_of_small_integers_do_not_overflow(session: ShmSession, client: Client, kind: Any) -> None:
    """16 times 16 is 0 in 8 bits, without a word: shapes are read as numbers."""

    def infer(call: Call) -> None:
        call.output("MAP", (kind(16), kind(16)), np.uint8).numpy()[:] = 7

    for room in (256, 16):
        (response,) = session.serve([client.request({}, {"MAP": room})], infer)
        assert response.error() is None
        place = client.places()["MAP"]
        assert place.is_in_response is (room == 16)
        assert place.is_in_response or client.output("MAP").tolist() == [[7] * 16] * 16


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    most = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("count", "left", "used_beside"), [(24, 13, 0), (80, 100, 16)])
def test_regions_that_nobody_uses_make_room(session: ShmSession, count: int, left: int, used_beside: int) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(Client())) for _ in range(count)]
        with descriptors_left(left):
            for client in [*clients, *clients[:count:3]]:
                (response,) = session.serve([client.request({"X": X}, {"Y": 16})], pass_on)
                assert response.error() is None
                np.testing.assert_array_equal(client.output("Y"), X)
                with contextlib.ExitStack() as opened:
                    for _ in range(used_beside):
                        opened.enter_context(Path("/dev/null").open())


def test_no_descriptor_at_all_is_an_error_of_the_machine(session: ShmSession) -> None:
    with contextlib.closing(Client()) as client:
        request = client.request({"X": X}, {"Y": 16})
        with descriptors_left(0):
            taken = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            (response,) = session.serve([request], pass_on)
            for descriptor in taken:
                os.close(descriptor)
        assert (error_code(response), message_of(response).partition(": ")[0]) == ("UNAVAILABLE", "shm:machine")
        assert log_lines() == []
        (response,) = session.serve([request], pass_on)
        assert response.error() is None


def test_a_client_writes_the_table_and_then_the_generation() -> None:
    region, written = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE), list[tuple[str, int, bytes]]()
    slot: Any = region.slots[0]
    assert slot.begin(b"before") == 1
    slot.become_free("answer")
    request = slot.record.request

    def note(part: str) -> None:
        written.append((part, int.from_bytes(request[:8], "little"), bytes(request[8:14])))

    for part in ("table", "client_words"):
        watched = Watched(getattr(slot.record, part), before_write=functools.partial(note, part))
        setattr(slot.record, part, watched)
    assert slot.begin(b"latest") == 2
    assert written == [("table", 1, b"before"), ("client_words", 1, b"latest")]
    assert slot.record.generation == 2
    region.destroy()


class WatchedModel:
    """What a model writes into a slot's record, with what the client would have seen there before that."""

    def __init__(self, client: Client, slot: int = 0) -> None:
        self.written: list[tuple[str, int, list[str]]] = []
        self._slot = slot
        self._byte_sizes = [client.region.header.byte_size]
        self._record = client.region.record(slot)  # made by the client, and so not watched

    def record(self, buffer: memoryview, slot: int, record_byte_size: int) -> SlotRecord:
        made: Any = SlotRecord(buffer, slot, record_byte_size)
        if slot == self._slot:
            made.results = Watched(made.results, before_write=lambda: self._note("results"))
            made.model_words = Watched(made.model_words, before_write=lambda: self._note("stamp"))
        return made  # type: ignore[no-any-return]

    def _note(self, what: str) -> None:
        found = results.decode(bytes(self._record.results), self._byte_sizes)
        self.written.append((what, found.completed, [place.name for place in found.outputs]))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_model_writes_results_before_completed(monkeypatch: pytest.MonkeyPatch, client: Client, slot: int) -> None:
    model = WatchedModel(client, slot)
    monkeypatch.setattr("shm_backend_utils.memory.managed.SlotRecord", model.record)
    policy: Any = {"model_transaction_policy": {"decoupled": bool(slot)}}
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], **policy) as session:

        def frames(call: StreamCall) -> Iterator[None]:
            call.put("Y", X)
            yield

        if slot:
            session.serve_streams([client.request({"X": X}, {"Y": 16}, ring=Ring(1, 1, 1024))], frames)
        else:
            (response,) = session.serve([client.request({"X": X}, {"Y": 16})], pass_on)
            assert response.error() is None
            assert model.written.pop(0) == ("stamp", 0, [])
    assert model.written == [("results", 0, []), ("stamp", 0, ["Y"])]
    assert client.region.record(slot).completed == (frame_number(1, 0) if slot else 1)
