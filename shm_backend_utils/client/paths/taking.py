"""Takes memory from a client's pool for calls: a region, a row of a block that calls share, or GPU memory, too."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

from ...dtypes import BYTES
from ...errors import BudgetError, MachineError, PoolExhaustedError
from ...gpu.memory.bank import ShortOfMemoryError, rounded_up
from ...memory.managed import RegionKind
from ...memory.pool.inventory import Need, Waiter
from ...memory.pool.pool import SlotPool
from ...memory.pool.rows import Row
from ...memory.pool.slot import Memory, SlotRegion
from ...protocol.call_layout import CallInput, CallLayout, rows_of
from ...protocol.layout import data_offset
from ..errors import out_of_time
from ..inputs.devices import Gpus
from ..known_model import KnownModel
from ..once import Once
from ..settings import CallSettings
from ..steps import Pause, Steps, Wait, left_until, offloaded
from .call import LONG_COPY, Plan
from .gpu_waits import LostMemoryError, models_are_done
from .triton_shm import RegisteredCall

__all__ = ["grow", "take", "take_row", "take_with_devices"]

_MAKING: Final = "its memory was being made"


def take(
    pool: SlotPool, settings: CallSettings, known: KnownModel, end: int, slot_count: int, group: str
) -> Steps[tuple[SlotRegion, Memory]]:
    """Take a region with room up to ``end``, where the last tensor ends; wait for room until the deadline."""
    kind = RegionKind.SYSTEM if group == RegisteredCall.path else known.kind
    need = _need(known, end, slot_count, group, kind)
    taken = pool.take_idle(need, settings.origin)
    return taken or (yield from _take_granted(pool, settings, pool.request(need, settings.origin)))


def _need(known: KnownModel, end: int, slot_count: int, group: str, kind: RegionKind) -> Need:
    size = known.record_byte_size
    return Need(end - data_offset(slot_count, size), slot_count, size, group, kind)


def grow(pool: SlotPool, settings: CallSettings, region: SlotRegion, memory: Memory, end: int) -> Steps[bool]:
    """Grow a region's data to the offset ``end`` if there is room now; return whether it worked."""

    def work() -> bool:  # this closure keeps the region in use after its caller has stopped waiting
        return memory.nbytes > 0 and pool.grow(region, end, settings.deadline)

    if end - region.data_end < LONG_COPY:
        return work()
    return (yield from offloaded(work, settings.deadline, _MAKING))


def _take_granted(pool: SlotPool, settings: CallSettings, waiter: Waiter) -> Steps[tuple[SlotRegion, Memory]]:
    try:
        if not waiter.granted.done():
            timeout_s = left_until(settings.deadline)
            try:
                yield Wait(waiter.granted, settings.deadline)
            except TimeoutError:
                raise pool.exhausted(waiter, timeout_s) from None
        work = functools.partial(pool.take_granted, waiter, settings.deadline)
        if waiter.byte_size >= LONG_COPY:
            return (yield from offloaded(work, settings.deadline, _MAKING))
        try:
            return work()  # small regions are made faster here than in another thread
        except TimeoutError:
            raise out_of_time(_MAKING) from None
    except BaseException:
        pool.withdraw(waiter)
        raise


_MOST_CALLS: Final = 64


def take_row(pool: SlotPool, once: Once, plan: Plan, *, is_expected: bool) -> Steps[Row[CallLayout] | None]:
    """Take a row of a block that similar calls share; None if the call must have a region of its own."""
    settings, known, layout, given, wanted, _ = plan
    blocks, table, batch_size = known.blocks, layout.table, layout.batch_size
    if batch_size is None or any(span.dtype is BYTES for span in table.inputs.values()):
        return None  # no batch combines such calls, and rows serve only batches
    most = min(_MOST_CALLS, pool.options.max_batch_bytes // max(layout.end - known.data_begin, 1))
    count = min(known.spec.max_batch_size // batch_size, most)
    if count < 2:
        return None
    key = layout.requested and tuple(layout.requested), tuple(table.inputs.items()), tuple(table.outputs.items())

    def begin() -> Steps[Memory | None]:
        """Make a block of rows; return its memory, which keeps the block alive, or None if the pool lacks room."""
        whole = known.lay_out(
            {
                name: CallInput(each.dtype, (each.shape[0] * count, *each.shape[1:]), each.byte_size * count)
                for name, each in given.items()
            },
            wanted and {name: None if size is None else size * count for name, size in wanted.items()},
            slot_count=count,
            is_one_request=False,
        )
        need = _need(known, whole.end, count, "direct, side by side", known.kind)
        taken = pool.take_idle(need, settings.origin)
        try:
            waiter = pool.request_at_once(need, settings.origin) if taken is None else None
            taken = taken if waiter is None else (yield from _take_granted(pool, settings, waiter))
        except (BudgetError, MachineError):
            return None
        if taken is None:
            return None
        begins = range(0, count * batch_size, batch_size)
        parts = [rows_of(whole, known.spec, begin, begin + batch_size) for begin in begins]
        blocks.begin(key, *taken, parts)
        return taken[1]

    row = blocks.take(key)
    may_begin = row is None and (is_expected or blocks.together == key)
    if row is None:
        blocks.together = None
    while row is None and may_begin:  # one call makes a block, and other calls wait for its rows
        block = yield from once.find((known, key), begin, settings.deadline)
        may_begin = block is not None
        row = blocks.take(key)
    return row


_ROUND_S: Final = 0.05


def take_with_devices(pool: SlotPool, gpus: Gpus, plan: Plan) -> Steps[tuple[SlotRegion, Memory]]:
    """Take a region with one slot and GPU memory; wait until no model's GPU works in that memory any more."""
    settings, layout = plan.settings, plan.layout
    sizes = [rounded_up(byte_size) for byte_size in layout.device_byte_sizes]
    where = [f"cuda:{device}={byte_size}" for device, byte_size in zip(layout.devices, sizes, strict=True)]
    group = " ".join(["direct, on GPUs", *where])
    while True:
        region, memory = yield from take(pool, settings, plan.known, layout.end, 1, group)
        try:
            if not region.device_memory.keys() >= set(layout.devices):
                provide = functools.partial(gpus.bank.provide, region, layout.devices, sizes)
                yield from _provide(pool, settings, provide, memory)
            yield from models_are_done(region, settings.deadline)
        except BaseException as error:
            region.spoil("lost")
            del memory  # the error's traceback must not keep the slot in use
            if not isinstance(error, LostMemoryError):
                raise  # after a LostMemoryError, another region will do
        else:
            return region, memory


def _provide(pool: SlotPool, settings: CallSettings, provide: Callable[[], None], memory: Memory) -> Steps[None]:
    """Give a region memory on GPUs; while there is too little, drop idle regions and retry until the deadline."""
    kept: list[Memory] = []  # keeps the region in use after the caller has stopped waiting

    def allocate() -> None:
        try:
            provide()
        finally:
            kept.clear()  # the error's traceback must not keep the region in use

    while True:
        kept.append(memory)
        try:
            return (yield from offloaded(allocate, settings.deadline, "its memory on GPUs was being made"))
        except ShortOfMemoryError as error:
            pool.drop_idle()
            if time.monotonic() > settings.deadline:
                raise PoolExhaustedError(f"no device memory became free in time: {error}") from None
            yield Pause(_ROUND_S)
