"""Regions of the pool with memory on GPUs, for calls that have tensors there."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from ...errors import PoolExhaustedError
from ...memory.cuda.bank import ShortOfMemoryError, rounded_up
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import SlotRegion
from ...protocol.call_layout import CallLayout
from ..inputs.gpus import Gpus
from ..known_model import KnownModel
from ..settings import CallSettings
from ..steps import Pause, Steps, offloaded
from .call import HostMemory
from .taking import take
from .waiting import LostMemoryError, models_are_done

__all__ = ["take_with_devices"]

_ROUND_S: Final = 0.05


def take_with_devices(
    pool: SlotPool, gpus: Gpus, settings: CallSettings, known: KnownModel, layout: CallLayout
) -> Steps[tuple[SlotRegion, HostMemory]]:
    """Take a region with one slot, and with what a call needs on GPUs; no model's GPU works there any more.

    Raises as :func:`.take`, also of memory on GPUs.
    """
    sizes = [rounded_up(byte_size) for byte_size in layout.device_byte_sizes]
    where = [f"cuda:{device}={byte_size}" for device, byte_size in zip(layout.devices, sizes, strict=True)]
    group = " ".join(["direct, on GPUs", *where])
    while True:
        region, memory = yield from take(pool, settings, known, layout.end, 1, group)
        try:
            if not region.device_memory.keys() >= set(layout.devices):
                yield from _provide(pool, gpus, settings, region, memory, layout.devices, sizes)
            if region.slots[0].was_left:
                raise LostMemoryError  # a model ended in the middle of an earlier request
            yield from models_are_done(region, list(region.device_memory.values()), settings.deadline)
        except BaseException as error:
            region.spoil("lost")
            del memory  # an error that somebody keeps must not keep the slot
            if not isinstance(error, LostMemoryError):
                raise  # else another region will do
        else:
            return region, memory


def _provide(
    pool: SlotPool,
    gpus: Gpus,
    settings: CallSettings,
    region: SlotRegion,
    memory: HostMemory,
    devices: Collection[int],
    byte_sizes: Collection[int],
) -> Steps[None]:
    """Let a region have memory on GPUs, until the deadline; idle regions go where there is too little.

    To allocate some may take its time. PoolExhaustedError if none became free in time; BudgetError or MachineError if
    there never will be so much.
    """
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
