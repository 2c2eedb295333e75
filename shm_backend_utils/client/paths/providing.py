"""Memory on GPUs for a region of the pool that a call has taken."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from ...errors import PoolExhaustedError
from ...memory.cuda.bank import ShortOfMemoryError
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import SlotRegion
from ..inputs.gpus import Gpus
from ..settings import CallSettings
from ..steps import Pause, Steps, offloaded
from .call import HostMemory
from .waiting import LostMemoryError, models_are_done

__all__ = ["provide", "wait_for_models"]

_ROUND_S: Final = 0.05


def provide(
    pool: SlotPool,
    gpus: Gpus,
    settings: CallSettings,
    region: SlotRegion,
    memory: HostMemory,
    devices: Collection[int],
    byte_sizes: Collection[int],
) -> Steps[None]:
    """Let a region with one slot have memory on GPUs, until the deadline; idle regions go where there is too little.

    PoolExhaustedError if none became free in time; BudgetError or MachineError if there never will be so much.
    """
    if region.device_memory.keys() >= set(devices):
        return  # and to allocate some may take its time

    kept: list[HostMemory] = []  # which keeps the region, if nobody waits for this any more

    def allocate() -> None:
        try:
            gpus.bank.provide(region, devices, byte_sizes)
        finally:
            kept.clear()  # an error that somebody keeps must not keep it

    while True:
        kept.append(memory)
        try:
            return (yield from offloaded(allocate, settings.left_s, "its memory on GPUs was being made"))
        except ShortOfMemoryError as error:
            pool.drop_idle()
            if time.monotonic() > settings.deadline:
                raise PoolExhaustedError(f"no device memory became free in time: {error}") from None
            yield Pause(_ROUND_S)


def wait_for_models(settings: CallSettings, region: SlotRegion) -> Steps[None]:
    """Wait until no model's GPU works in a region any more: models may leave that to their clients.

    LostMemoryError also if a model ended in the middle of an earlier request.
    """
    if region.slots[0].was_left:
        raise LostMemoryError
    yield from models_are_done(region, list(region.device_memory.values()), settings.deadline)
