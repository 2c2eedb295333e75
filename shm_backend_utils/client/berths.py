"""Finding memory for calls on the direct path, which may have to be waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import PeerError
from .berth import Berth
from .demand import Demand
from .device_bank import DeviceBank, ShortOfMemoryError, rounded_up
from .errors import BudgetError, PoolExhaustedError
from .models import KnownModel
from .plan import CallPlan
from .pool import SlotPool, Ticket
from .runtime import Runtime
from .slabs import Slabs
from .slot import Slot

__all__ = ["Berths"]

Memory = npt.NDArray[np.uint8]

_DIRECT: Final = "direct"
_ROUND_S: Final = 0.05
_MOST_TURNS: Final = 64


class Berths:
    """Memory for the calls of one client.

    Calls that a model may serve as one batch are placed side by side, in a slab; see :mod:`.slabs`. Who makes one call
    after another needs none: the first call at a time gets a slot of its own.
    """

    def __init__(self, pool: SlotPool, bank: DeviceBank, runtime: Runtime) -> None:
        self._pool = pool
        self._bank = bank
        self._runtime = runtime
        self._slabs = Slabs()
        self._alone: set[CallPlan] = set()  # with a slot of their own

    async def brief(self, demand: Demand, known: KnownModel, plan: CallPlan) -> Berth:
        """Return memory for a call of one request."""
        count = self._turn_count(known, plan)
        if count < 2:
            return await self._on_its_own(demand, plan)
        berth = self._slabs.take(plan)
        if berth is not None:
            return berth
        if self._slabs.are_shared(plan):
            return await self._in_a_slab(demand, known, plan, count)
        taken = self._pool.take_idle(plan.byte_size, 1, _DIRECT, demand.origin)
        if taken is not None:
            return _berth(plan, *taken)
        if plan not in self._alone:
            if len(self._alone) >= _MOST_TURNS:
                self._alone.clear()
            self._alone.add(plan)
            return await self._on_its_own(demand, plan)
        return await self._in_a_slab(demand, known, plan, count)

    async def lasting(self, demand: Demand, known: KnownModel, plan: CallPlan) -> Berth:
        """Return memory for a call that the user keeps, for any number of requests."""
        count = self._turn_count(known, plan)
        if count < 2:
            return await self._on_its_own(demand, plan)
        return self._slabs.take(plan) or await self._in_a_slab(demand, known, plan, count)

    async def take_slot(
        self, demand: Demand, byte_size: int, turn_count: int, group: str
    ) -> tuple[Slot, npt.NDArray[np.uint8]]:
        """Wait for a slot, until the deadline, and return it with its memory."""
        taken = self._pool.take_idle(byte_size, turn_count, group, demand.origin)
        if taken is None:
            taken = await self._wait_for_slot(demand, self._pool.request(byte_size, turn_count, group, demand.origin))
        return taken

    def _turn_count(self, known: KnownModel, plan: CallPlan) -> int:
        """Return how many calls shall lie side by side; less than 2 for calls of which no batches are made."""
        if not known.spec.has_batcher or plan.batch_size is None or plan.devices or plan.strings:
            return 0
        most = min(_MOST_TURNS, self._pool.options.max_batch_bytes // max(plan.byte_size, 1))
        return min(known.spec.max_batch_size // plan.batch_size, most)

    async def _in_a_slab(self, demand: Demand, known: KnownModel, plan: CallPlan, count: int) -> Berth:
        """Return the first turn of a new slab; a slot of its own, if there is no room for a slab now."""
        whole = known.plan_of_many(plan, count)
        group = f"{_DIRECT}, {count} side by side"
        taken = self._pool.take_idle(whole.byte_size, count, group, demand.origin)
        if taken is None:
            try:
                ticket = self._pool.request(whole.byte_size, count, group, demand.origin)
            except BudgetError:
                return await self._on_its_own(demand, plan)
            if not ticket.granted.done():
                self._pool.withdraw(ticket)
                return await self._on_its_own(demand, plan)
            taken = await self._wait_for_slot(demand, ticket)
        return self._slabs.begin(plan, whole, *taken)

    async def _on_its_own(self, demand: Demand, plan: CallPlan) -> Berth:
        """Return a slot, with what it needs on GPUs."""
        if not plan.devices:
            return _berth(plan, *await self.take_slot(demand, plan.byte_size, 1, _DIRECT))
        sizes = [rounded_up(byte_size) for byte_size in plan.device_byte_sizes]
        where = [f"cuda:{device}={byte_size}" for device, byte_size in zip(plan.devices, sizes, strict=True)]
        group = " ".join([_DIRECT, *where])
        while True:
            slot, memory = await self.take_slot(demand, plan.byte_size, 1, group)
            try:
                await self._provide(demand, slot, plan.devices, sizes)
                await self._wait_for_models(slot)
            except PeerError:  # nobody will ever know when the last model's GPU has finished here
                slot.is_spoiled = True
            except BaseException:
                slot.is_spoiled = True
                del memory  # an error that somebody keeps must not keep the slot
                raise
            else:
                return _berth(plan, slot, memory)
            del memory

    async def _wait_for_models(self, slot: Slot) -> None:
        events = slot.events
        if events:
            await self._runtime.offload(lambda: slot.listener.wait(events))

    async def _provide(self, demand: Demand, slot: Slot, devices: Sequence[int], sizes: Sequence[int]) -> None:
        """Let a slot have memory on GPUs, until the deadline."""
        while True:
            try:
                self._bank.provide(slot, devices, sizes)
            except ShortOfMemoryError as error:
                self._pool.drop_idle()
                if time.monotonic() > demand.deadline:
                    raise PoolExhaustedError(f"no device memory became free in time: {error}") from None
                await self._runtime.pause(_ROUND_S)
            else:
                return

    async def _wait_for_slot(self, demand: Demand, ticket: Ticket) -> tuple[Slot, npt.NDArray[np.uint8]]:
        try:
            if not ticket.granted.done():
                timeout_s = demand.left_s
                try:
                    await self._runtime.wait(ticket.granted, timeout_s)
                except TimeoutError:
                    raise self._pool.exhausted(ticket, timeout_s) from None
            return await self._runtime.offload(lambda: self._pool.redeem(ticket))
        except BaseException:
            self._pool.withdraw(ticket)
            raise


def _berth(plan: CallPlan, slot: Slot, memory: Memory) -> Berth:
    return Berth(slot, slot.turns[0], plan, memory)
