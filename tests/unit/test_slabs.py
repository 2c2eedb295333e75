"""Slabs: one slot for several calls, side by side; who gets which turn, and when the slot is the pool's again."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.berth import Berth
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.origin import Origin
from shm_backend_utils.client.plan import signature
from shm_backend_utils.client.pool import SlotPool
from shm_backend_utils.client.pool_options import PoolOptions
from shm_backend_utils.client.slabs import Slabs
from shm_backend_utils.client.slot import Slot
from shm_backend_utils.memory.locks import SlotLease, borrow
from shm_backend_utils.model_spec import ModelSpec

SHM = Path("/dev/shm")
TURNS = 4
WIDTH = 8
MODEL = ModelSpec.from_config(
    {
        "name": "rows",
        "max_batch_size": TURNS,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [WIDTH], "optional": True}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [WIDTH]}],
        "dynamic_batching": {},
    }
)


class Bench:
    """A pool, and slabs of four calls, one row each."""

    def __init__(self, pool: SlotPool) -> None:
        known = KnownModel(MODEL, 1.25)
        self.pool = pool
        self.slabs = Slabs()
        self.plan = known.plan(signature({"X": ((1, WIDTH), np.float32)}, None))
        self.whole = known.plan_of_many(self.plan, TURNS)

    def begin(self) -> Berth:
        """Make a slab, and return its first turn."""
        ticket = self.pool.request(self.whole.byte_size, TURNS, "slab", Origin("begin"))
        return self.slabs.begin(self.plan, self.whole, *self.pool.redeem(ticket))

    def take(self) -> Berth | None:
        return self.slabs.take(self.plan)

    def take_all(self) -> list[Berth]:
        """Return all turns of a new slab."""
        return [self.begin(), *[must(self.take()) for _ in range(TURNS - 1)]]

    @property
    def figures(self) -> tuple[int, int, int]:
        status = self.pool.status
        return status.held, status.idle, status.quarantined


def must(berth: Berth | None) -> Berth:
    assert berth is not None
    return berth


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**20))) as pool:
        yield Bench(pool)


@contextlib.contextmanager
def executing(slot: Slot, turn: int) -> Iterator[None]:
    """Hold the lease of a turn as a model does."""
    fd = os.open(SHM / slot.key, os.O_RDWR)
    try:
        assert SlotLease(fd, turn).take()
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def borrowing(slot: Slot, turn: int) -> Iterator[None]:
    """Hold the lease of a turn as a model does to which its memory was lent."""
    fd = os.open(SHM / slot.key, os.O_RDWR)
    try:
        lease = borrow(fd, turn)
        assert lease is not None
        yield
        lease.give_back()
    finally:
        os.close(fd)


def test_calls_lie_side_by_side_in_the_order_in_which_they_came(bench: Bench) -> None:
    berths = bench.take_all()
    assert len({berth.slot for berth in berths}) == 1
    assert [berth.turn.index for berth in berths] == list(range(TURNS))
    for spans in ([berth.plan.inputs["X"] for berth in berths], [berth.plan.outputs["Y"] for berth in berths]):
        assert np.diff([span.offset for span in spans]).tolist() == [4 * WIDTH] * (TURNS - 1)
        assert {span.byte_size for span in spans} == {4 * WIDTH}
    assert {berth.plan.batch_size for berth in berths} == {1}
    assert {berth.plan.signature for berth in berths} == {bench.plan.signature}


def test_inputs_and_outputs_of_all_calls_are_apart(bench: Bench) -> None:
    spans = []
    for berth in bench.take_all():
        x, y = berth.plan.inputs["X"], berth.plan.outputs["Y"]
        spans += [(x.offset, x.offset + x.byte_size), (y.offset, y.offset + y.byte_size)]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= bench.whole.byte_size


def test_nobody_gets_a_turn_where_there_is_no_slab(bench: Bench) -> None:
    assert bench.take() is None


def test_nobody_gets_a_turn_of_a_slab_that_is_full(bench: Bench) -> None:
    berths = bench.take_all()
    assert bench.take() is None
    del berths


def test_a_turn_that_came_back_is_given_to_the_next_and_the_first_of_several_first(bench: Bench) -> None:
    berths = bench.take_all()
    for index in (2, 1):
        berths[index] = berths[0]
    assert [must(bench.take()).turn.index for _ in range(2)] == [1, 1]
    kept = [must(bench.take()), must(bench.take())]
    assert [berth.turn.index for berth in kept] == [1, 2]
    assert bench.take() is None


def test_a_full_slab_does_not_hide_one_that_has_room(bench: Bench) -> None:
    full, roomy = bench.take_all(), bench.begin()
    berth = must(bench.take())
    assert berth.slot is roomy.slot
    assert berth.slot is not full[0].slot


@pytest.mark.parametrize(
    "derived",
    [
        lambda memory: memory[10:],
        lambda memory: np.ndarray((4,), np.float32, memory, 4096)[1:].reshape(3, 1),
        memoryview,
        lambda memory: np.from_dlpack(memory[3:]),
    ],
    ids=["view", "view of one over its buffer", "memoryview", "dlpack"],
)
def test_whatever_is_made_of_its_memory_holds_a_turn_and_no_other(bench: Bench, derived: Callable[[Any], Any]) -> None:
    berths = bench.take_all()
    last = derived(berths[1].memory)
    berths[1] = berths[0]
    assert bench.take() is None
    del last
    assert must(bench.take()).turn.index == 1


def test_the_slot_is_the_pools_again_when_the_last_turn_is(bench: Bench) -> None:
    berths = bench.take_all()
    assert bench.figures == (1, 0, 0)
    while berths:
        assert bench.figures == (1, 0, 0)
        berths.pop()
    assert bench.figures == (0, 1, 0)
    assert bench.take() is None


def test_a_slab_is_made_of_the_same_slot_again_with_all_turns_free(bench: Bench) -> None:
    slot = bench.begin().slot
    berths = bench.take_all()
    assert {berth.slot for berth in berths} == {slot}
    assert [berth.turn.index for berth in berths] == list(range(TURNS))


def test_the_plans_of_turns_are_the_same_objects_when_a_slot_is_used_again(bench: Bench) -> None:
    plans = [berth.plan for berth in bench.take_all()]
    assert all(again.plan is plan for again, plan in zip(bench.take_all(), plans, strict=True))


@pytest.mark.parametrize("at_work", [executing, borrowing])
def test_a_turn_in_which_a_model_is_at_work_is_not_given_again(bench: Bench, at_work: Any) -> None:
    first, second = bench.begin(), must(bench.take())
    slot, turn = second.slot, second.turn
    turn.is_in_doubt = True
    with at_work(slot, turn.index):
        del second
        others = [must(bench.take()) for _ in range(TURNS - 2)]
        assert turn.index not in [berth.turn.index for berth in others]
        assert bench.take() is None
        del first, others
        assert bench.figures == (0, 0, 1)
        assert bench.begin().slot is not slot


def test_a_turn_in_doubt_in_which_no_model_is_at_work_is_given_again_and_its_request_is_stale(bench: Bench) -> None:
    first, second = bench.begin(), must(bench.take())
    generation = second.turn.advance()
    second.turn.is_in_doubt = True
    del second
    again = must(bench.take())
    assert again.turn.index == 1
    assert not again.turn.is_in_doubt
    assert again.turn.record.generation == again.turn.generation == generation + 1
    assert first.turn.generation == 0


def test_a_doubtful_turn_is_free_again_when_its_model_is_done_and_the_slab_was_left(bench: Bench) -> None:
    berth = bench.begin()
    slot = berth.slot
    berth.turn.is_in_doubt = True
    with executing(slot, 0):
        del berth
        assert bench.figures == (0, 0, 1)
    slot_again = None
    while slot_again is not slot:
        slot_again = bench.begin().slot
    assert not slot.is_in_doubt


def test_no_turn_of_a_lost_slot_is_given(bench: Bench) -> None:
    first, second = bench.begin(), must(bench.take())
    first.slot.is_spoiled = True
    assert bench.take() is None
    slot = first.slot
    del first
    assert bench.take() is None
    assert (SHM / slot.key).exists()
    del second
    assert bench.figures == (0, 0, 0)
    assert not (SHM / slot.key).exists()


def test_calls_that_are_made_one_at_a_time_are_not_taken_for_shared(bench: Bench) -> None:
    for _ in range(3):
        bench.begin()
        assert not bench.slabs.are_shared(bench.plan)


def test_calls_that_were_made_side_by_side_are_remembered_until_one_is_alone(bench: Bench) -> None:
    bench.take_all()
    assert bench.slabs.are_shared(bench.plan)
    bench.begin()
    assert not bench.slabs.are_shared(bench.plan)


def test_turns_of_a_pool_that_was_closed_come_back_to_nobody(bench: Bench) -> None:
    berths = bench.take_all()
    berths[1].turn.is_in_doubt = True
    memory = berths[2].memory
    memory[-4:] = 7
    bench.pool.close()
    berths.clear()
    assert memory[-4:].tolist() == [7] * 4
    del memory


def test_threads_never_share_a_turn(bench: Bench) -> None:
    holder = bench.begin()

    def use(thread: int) -> int:
        used = 0
        for _ in range(300):
            berth = bench.take()
            if berth is None:
                continue
            span = berth.plan.inputs["X"]
            begin = berth.slot.data_offset + span.offset
            mine = berth.memory[begin : begin + span.byte_size]
            del berth
            mine[:] = thread
            assert (mine == thread).all()
            used += 1
        return used

    with ThreadPoolExecutor(TURNS) as threads:
        assert sum(threads.map(use, range(TURNS))) > 0
    assert bench.figures == (1, 0, 0)
    del holder
    assert bench.figures == (0, 1, 0)
