"""A pool against a model of it, in any order; and prepared calls whose outputs have any sizes."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from shm_backend_utils.client import Result
from shm_backend_utils.errors import BudgetError, ClosedError, RegionGoneError
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.pool.inventory import Need, Waiter
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset
from tests.opened import open_region
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

BUDGET = 8 * PAGE_SIZE
needs = st.builds(
    Need,
    st.integers(0, 7 * PAGE_SIZE),
    slot_count=st.sampled_from([1, 1, 1, 2]),
    record_byte_size=st.sampled_from([PAGE_SIZE, PAGE_SIZE, 2 * PAGE_SIZE]),
    group=st.sampled_from(["direct", "direct", "triton-shm"]),
    kind=st.sampled_from([RegionKind.SYSTEM, RegionKind.SYSTEM, RegionKind.SEALED]),
)


class Holding:
    """A region that somebody has, and the model that may be at work in it."""

    def __init__(self, need: Need, region: SlotRegion, memory: npt.NDArray[np.uint8]) -> None:
        self.need = need
        self.region = region
        self.memory = memory


class PoolMachine(RuleBasedStateMachine):
    """What clients do with a pool, one step at a time."""

    held: Bundle[Holding] = Bundle("held")
    waiting: Bundle[Waiter] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(PoolOptions(max_bytes=BUDGET, prefault=False))
        self.holdings: list[Holding] = []
        self.waiters: list[Waiter] = []
        self.leases: list[tuple[ManagedRegion, SlotRegion]] = []
        self.kinds: dict[str, object] = {}
        self.is_closed = False

    def teardown(self) -> None:
        self.pool.close()
        for model, _ in self.leases:
            model.close()

    def hold(self, need: Need, region: SlotRegion, memory: npt.NDArray[np.uint8]) -> Holding:
        assert region.key not in [each.region.key for each in self.holdings], "handed out twice"
        assert region.key not in [each.key for _, each in self.leases if each.state != "spoiled"], "out of quarantine"
        assert region.capacity >= need.byte_size
        assert len(region.slots) == need.slot_count
        assert memory.nbytes == region.byte_size
        assert self.kinds.setdefault(region.key, need[1:]) == need[1:], "of another kind"
        holding = Holding(need, region, memory)
        self.holdings.append(holding)
        return holding

    @rule(target=held, need=needs)
    def take_idle(self, need: Need) -> Any:
        taken = self.pool.take_idle(need, "machine")
        if taken is None:
            return multiple()
        assert not self.is_closed
        assert all(waiter.granted.done() for waiter in self.waiters), "past those that wait"
        return self.hold(need, *taken)

    @rule(target=waiting, need=needs)
    def request(self, need: Need) -> Any:
        try:
            waiter = self.pool.request(need, "machine")
        except ClosedError:
            assert self.is_closed
            return multiple()
        except BudgetError:
            assert need.byte_size + data_offset(need.slot_count, need.record_byte_size) > BUDGET - PAGE_SIZE
            return multiple()
        self.waiters.append(waiter)
        return waiter

    @rule(target=held, waiter=consumes(waiting))
    def take_granted(self, waiter: Waiter) -> Any:
        if not waiter.granted.done():
            self.pool.withdraw(waiter)
            self.waiters.remove(waiter)
            return multiple()
        self.waiters.remove(waiter)
        try:
            return self.hold(waiter.need, *self.pool.take_granted(waiter))
        except ClosedError:
            assert self.is_closed
            return multiple()

    @rule(waiter=consumes(waiting))
    def withdraw(self, waiter: Waiter) -> None:
        self.pool.withdraw(waiter)
        self.waiters.remove(waiter)

    @rule(holding=consumes(held), fate=st.sampled_from(["well", "well", "well", "spoiled", "in doubt"]))
    def give_back(self, holding: Holding, fate: str) -> None:
        self.holdings.remove(holding)
        if fate == "spoiled":
            holding.region.spoil("refusal")
        elif fate == "in doubt":
            holding.region.slots[0].state = "sent"
        holding.memory = np.empty(0, np.uint8)

    @precondition(lambda self: not self.is_closed)
    @rule(holding=consumes(held))
    def give_back_while_a_model_executes(self, holding: Holding) -> None:
        self.holdings.remove(holding)
        with contextlib.suppress(RegionGoneError):
            model = open_region(holding.region.key, holding.region.token)
            assert model.lease(0).take()
            self.leases.append((model, holding.region))
        holding.region.slots[0].state = "sent"
        holding.memory = np.empty(0, np.uint8)

    @precondition(lambda self: self.leases)
    @rule()
    def the_model_has_finished(self) -> None:
        model, _ = self.leases.pop()
        model.lease(0).give_back()
        model.close()

    @rule()
    def drop_idle(self) -> None:
        self.pool.drop_idle()
        assert self.pool.status.idle == 0

    @precondition(lambda self: len(self.holdings) > 2)
    @rule()
    def close(self) -> None:
        self.pool.close()
        self.is_closed = True
        assert all(waiter.granted.done() for waiter in self.waiters)

    @invariant()
    def the_figures_are_right(self) -> None:
        status = self.pool.status
        assert status.byte_size <= status.max_bytes
        if self.is_closed:
            assert (status.held, status.idle, status.quarantined, status.byte_size) == (0, 0, 0, 0)
            return
        granted = [waiter.granted.result() for waiter in self.waiters if waiter.granted.done()]
        assert status.held == len(self.holdings) + sum(isinstance(grant, SlotRegion) for grant in granted)
        assert status.quarantined == len(self.leases)
        if status.idle and self.waiters:
            first = next((waiter for waiter in self.waiters if not waiter.granted.done()), None)
            assert first is None or first.byte_size > status.max_bytes - status.byte_size

    @invariant()
    def what_is_held_has_its_name(self) -> None:
        for holding in self.holdings:
            assert holding.region._region.segment.is_unlinked is self.is_closed


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


OUTPUTS = ("OUT0", "OUT1")
HEAD_ROOM = PoolOptions().head_room
COUNTS = st.one_of(st.integers(0, 50), st.integers(0, 5_000), st.integers(0, 50_000))
ROOMS = st.none() | st.integers(0, 10_000)


def counted(_: Order, inputs: Arrays) -> Arrays:
    first, second = inputs["IN0"].tolist()
    return {"OUT0": np.arange(first, dtype=np.int32), "OUT1": np.arange(second, dtype=np.int32) + 7}


def is_right(result: Result, counts: tuple[int, int]) -> bool:
    return all(np.array_equal(result[f"OUT{n}"], np.arange(count) + 7 * n) for n, count in enumerate(counts))


@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(COUNTS, COUNTS, st.booleans()), min_size=1, max_size=8),
    hints=st.tuples(ROOMS, ROOMS),
    budget=st.sampled_from([2**16, 2**19, 2**26]),
)
def test_every_output_is_right_and_what_fits_overflows_no_more(
    pairs: list[tuple[int, int, bool]], hints: tuple[int | None, int | None], budget: int
) -> None:
    is_ample = budget == 2**26
    rooms, learned, lacking = [hint or 0 for hint in hints], [0, 0], False
    kept: list[Result] = []
    with (
        FakeServer(config("m", dtype="TYPE_INT32", count=2), compute=counted) as server,
        client_of(server, pool=PoolOptions(max_bytes=budget)) as client,
    ):
        with client.prepare("m", {"IN0": ((2,), np.int32)}, outputs=dict(zip(OUTPUTS, hints, strict=True))) as call:
            for *counts, keep in pairs:
                call.inputs["IN0"][:] = counts
                result = call.infer()
                assert is_right(result, (counts[0], counts[1]))
                if lacking:
                    rooms = [max(room, known) for room, known in zip(rooms, learned, strict=True)]
                too_large = [4 * count > room for count, room in zip(counts, rooms, strict=True)]
                if is_ample:
                    assert [name in result.overflowed for name in OUTPUTS] == too_large
                lacking = any(too_large)
                for n, (count, overflows) in enumerate(zip(counts, too_large, strict=True)):
                    if overflows:
                        learned[n] = max(learned[n], math.ceil(4 * count * HEAD_ROOM))
                if keep:
                    kept.append(result)
                assert client.stats().pool_bytes <= budget
            del result
        kept.clear()
        assert client.stats().slots_held == client.stats().quarantined == 0
