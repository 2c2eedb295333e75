"""When a stream's client writes which table to which place of its ring, and what it does with the memory in the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.client.inputs.descriptions import described_inputs
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.paths.further import HostMemory
from shm_backend_utils.client.paths.stream import DirectStream, ring_end
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.locks import borrow
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import Slot, SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.frame_table import decode_rooms
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset, record_offset
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import OutputSpan, frame_number
from tests.opened import open_region

SPEC = ModelSpec.from_config(
    {
        "name": "frames",
        "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [4]}],
        "output": [{"name": name, "data_type": "TYPE_UINT8", "dims": [-1]} for name in "YZ"],
        "model_transaction_policy": {"decoupled": True},
    }
)
UINT8 = BY_NAME["UINT8"]


class Answer:
    """What came through Triton."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.as_numpy = arrays.get


class FakeCodec:
    def infer(self, request: Any) -> Any:
        return request

    def result(self, answer: Answer) -> Answer:
        return answer


class Both:
    """A client's stream, and a model that writes its frames when it is told to."""

    def __init__(self, pool: SlotPool, frames: int) -> None:
        self.pool = pool
        self.known = KnownModel(SPEC, head_room=1.0)
        given = described_inputs({"X": ((4,), np.uint8)})
        layout = self.known.lay_out(given, None, slot_count=1 + frames)
        need = Need(ring_end(layout, frames) - data_offset(1 + frames, PAGE_SIZE), 1 + frames, PAGE_SIZE, "stream")
        self.region, memory = self.take(need)
        codec: Any = FakeCodec()
        self.stream = DirectStream(codec, SPEC, layout, RequestOptions(), self.region, memory)
        self.stream.message()
        self.frames = frames
        self.sent = 0

    def take(self, need: Need) -> tuple[SlotRegion, npt.NDArray[np.uint8]]:
        return self.pool.redeem(self.pool.request(need, "test"))

    def record(self, place: int) -> Any:
        return self.region.slots[1 + place].record

    @property
    def generation(self) -> int:
        return self.region.slots[0].generation

    def rooms(self, place: int) -> dict[str, OutputSpan]:
        """Return what the model would find in a place's record."""
        since = self.record(place).room_since
        if since <= frame_number(self.generation, -1):
            return {}
        assert since <= frame_number(self.generation, self.sent - 1)
        return decode_rooms(bytes(self.record(place).request))[1].outputs

    def send(self, **sizes: int) -> Result:
        """Have the model write the next frame where there is room, and the client read it, and learn."""
        place, outputs, arrays = self.sent % self.frames, [], {}
        rooms = {**self.stream.layout.table.outputs, **self.rooms(place)}
        for name, size in sizes.items():
            room = rooms[name]
            if room.byte_size < size:
                arrays[name] = np.full(size, self.sent, np.uint8)
                outputs.append(OutputPlace(name, UINT8, (size,), 0, 0, 0, True))
            else:
                outputs.append(OutputPlace(name, UINT8, (size,), room.region, room.offset, size, False))
        self.record(place).complete(frame_number(self.generation, self.sent), results.encode(outputs))
        self.sent += 1
        result = self.stream.result(Answer(arrays))
        if result.overflowed:
            self.grow(result)
        return result

    def grow(self, result: Result) -> None:
        self.known.learned.learn(result.overflowed, 1)
        needed = self.stream.needed_rooms(result.overflowed, self.known.learned.per_row)
        if needed:
            further = HostMemory(*self.take(Need(self.stream.needed_bytes(needed))))
            self.stream.grow(further, needed)
        self.stream.let_go()

    def end(self) -> None:
        self.region.slots[0].record.complete(self.generation, results.NO_RESULTS)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(PoolOptions(max_bytes=2**24))
    yield pool
    pool.close()


@pytest.fixture
def both(pool: SlotPool) -> Iterator[Both]:
    both = Both(pool, 3)
    yield both
    both.stream.close()


@pytest.fixture
def done(both: Both, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the client does with slots from here on."""
    done: list[str] = []
    for name in ("give_room", "release_frame", "give_up", "reclaim"):
        monkeypatch.setattr(Slot, name, functools.partialmethod(noting, getattr(Slot, name), done))
    return done


def noting(slot: Slot, what: Any, done: list[str], *arguments: Any) -> Any:
    done.append(f"{what.__name__} {slot.index}")
    return what(slot, *arguments)


def sizes_told(both: Both) -> list[dict[str, int]]:
    return [{name: room.byte_size for name, room in both.rooms(place).items()} for place in range(both.frames)]


def test_after_the_first_response_that_overflows_every_place_has_room_of_its_own(both: Both, done: list[str]) -> None:
    assert sizes_told(both) == [{}] * 3
    both.send(Y=1000, Z=10)
    assert sizes_told(both) == [{"Y": 1000, "Z": 10}] * 3
    assert [both.record(place).room_since for place in range(3)] == [frame_number(both.generation, 0)] * 3
    assert done == ["give_room 1", "give_room 2", "give_room 3", "release_frame 1"]
    spans = sorted((span.offset, span.byte_size) for place in range(3) for span in both.rooms(place).values())
    assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(spans))


def test_only_what_overflowed_is_moved(both: Both) -> None:
    both.send(Y=100, Z=0)
    assert sizes_told(both) == [{"Y": 100}] * 3
    both.send(Y=1, Z=200)
    for _ in range(3):
        both.send(Y=1, Z=1).release()
    assert sizes_told(both) == [{"Y": 100, "Z": 200}] * 3


def test_a_place_whose_frame_was_released_is_told_of_more_when_its_next_frame_comes(both: Both) -> None:
    both.send(Y=10).release()  # all places have room for 10 now
    both.send(Y=10).release()  # place 1: from here on a model may read its table
    kept = both.send(Y=10)  # place 2
    overflowed = both.send(Y=500)  # place 0
    assert sizes_told(both) == [{"Y": 500}, {"Y": 10}, {"Y": 500}]
    both.send(Y=5).release()
    assert sizes_told(both) == [{"Y": 500}] * 3
    del kept, overflowed


def test_a_region_that_no_place_names_any_more_goes_back(both: Both) -> None:
    for _ in range(4):
        both.send(Y=100).release()
        assert both.pool.status.held == 2, "what fits makes nothing grow"
    both.send(Y=5000).release()
    assert both.pool.status.held == 3  # places that were released before may still be read
    for _ in range(3):
        both.send(Y=5000).release()
    assert both.pool.status.held == 2
    both.send(Y=9000).release()
    kept = both.send(Y=1)
    assert both.pool.status.held == 3
    both.end()
    both.stream.close()
    assert (both.pool.status.held, both.pool.status.quarantined) == (2, 0)
    assert kept["Y"].shape == (1,)
    del kept
    assert both.pool.status.held == 0


def test_a_stream_that_is_broken_off_keeps_what_it_lent_until_no_model_has_it(both: Both, done: list[str]) -> None:
    both.send(Y=100).release()
    generation = both.generation
    lent = decode_rooms(bytes(both.record(0).request))[0]
    model = open_region(lent.key, lent.token, "test")
    lease = borrow(model.segment.fileno(), record_offset(lent.slot, PAGE_SIZE))
    assert lease is not None
    done.clear()
    both.stream.close()
    assert done[0] == "give_up 0", "before anything is taken back"
    assert {each.partition(" ")[0] for each in done[1:]} == {"reclaim"}
    assert both.region.slots[0].generation > generation  # who borrows later finds that
    assert both.pool.status.quarantined == 1
    lease.give_back()
    assert both.pool.status.quarantined == 0
    model.close()


@given(
    frames=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 3)), max_size=30),
)
def test_no_table_is_written_over_that_a_model_may_be_reading(frames: int, steps: list[tuple[int, int, int]]) -> None:
    """A place is the model's from its frame's release until the next one comes, but where no table was there before."""
    pool = SlotPool(PoolOptions(max_bytes=2**24))
    both = Both(pool, frames)
    told: set[int] = set()
    held: list[tuple[Result, dict[str, int]]] = []
    write = Slot.give_room

    def give_room(slot: Slot, contents: bytes, number: int) -> None:
        place = slot.index - 1
        last = max((index for index in range(both.sent) if index % frames == place), default=None)
        is_held = last is not None and slot.record.generation < frame_number(both.generation, last)
        assert is_held or place not in told
        told.add(place)
        write(slot, contents, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "give_room", give_room)
        for y, z, most_held in steps:
            while len(held) > min(most_held, frames - 1):
                held.pop(0)
            held.append((both.send(Y=y, Z=z), {"Y": y, "Z": z}))
            assert all(len(result[name]) == wanted[name] for result, wanted in held for name in "YZ")
        both.end()
        both.stream.close()
        held.clear()
    assert (pool.status.held, pool.status.quarantined) == (0, 0)
    pool.close()


@pytest.mark.parametrize("missing", [1, 2, 4, -1])
def test_a_frame_that_is_not_the_next_one_is_the_peers_error(pool: SlotPool, missing: int) -> None:
    """A frame of an earlier request, or of an earlier round of the ring, lies where the next one comes."""
    both = Both(pool, 2)
    both.send(Y=8)
    place = both.sent % both.frames
    both.record(place).complete(frame_number(both.generation, both.sent - missing), results.encode([]))
    with pytest.raises(PeerError):
        both.stream.result(Answer({}))
    both.end()
