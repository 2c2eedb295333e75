"""Taking regions of a client's pool for its calls: at once, or when there is room."""

from __future__ import annotations

import functools
from typing import Final

from ...errors import BudgetError, MachineError
from ...memory.kinds import RegionKind
from ...memory.pool.need import Need
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import SlotRegion
from ...memory.pool.tickets import Ticket
from ...protocol.layout import data_offset
from ..errors import out_of_time
from ..known_model import KnownModel
from ..settings import CallSettings
from ..steps import Steps, Wait, offloaded
from .call import LONG_COPY, HostMemory
from .triton_shm import RegisteredCall

__all__ = ["take", "take_at_once", "wait_for"]

_MAKING: Final = "its memory was being made"


def take(
    pool: SlotPool, settings: CallSettings, known: KnownModel, end: int, slot_count: int, group: str
) -> Steps[tuple[SlotRegion, HostMemory]]:
    """Take a region for a model's calls, whose last tensor ends at ``end``, until the deadline.

    It is given back when the array, which is the whole region, and all arrays made from it are gone. Regions of
    different groups are never exchanged. PoolExhaustedError if there is no memory now, BudgetError if there never
    will be, MachineError if this machine has none.
    """
    size = known.record_byte_size
    kind = RegionKind.SYSTEM if group == RegisteredCall.path else known.kind
    need = Need(end - data_offset(slot_count, size), slot_count, size, group, kind)
    return pool.take_idle(need, settings.origin) or (yield from wait_for(pool, settings, need))


def take_at_once(pool: SlotPool, settings: CallSettings, need: Need) -> Steps[tuple[SlotRegion, HostMemory] | None]:
    """Take a region if there is room for it now; else return None."""
    taken = pool.take_idle(need, settings.origin)
    if taken is not None:
        return taken
    try:
        ticket = pool.request_at_once(need, settings.origin)
        return None if ticket is None else (yield from _redeem(pool, settings, ticket))
    except (BudgetError, MachineError):
        return None


def wait_for(pool: SlotPool, settings: CallSettings, need: Need) -> Steps[tuple[SlotRegion, HostMemory]]:
    """Wait in the pool's order for a region, as none lies idle. Returns and raises as :func:`take`."""
    return (yield from _redeem(pool, settings, pool.request(need, settings.origin)))


def _redeem(pool: SlotPool, settings: CallSettings, ticket: Ticket) -> Steps[tuple[SlotRegion, HostMemory]]:
    try:
        if not ticket.granted.done():
            timeout_s = settings.left_s
            try:
                yield Wait(ticket.granted, timeout_s)
            except TimeoutError:
                raise pool.exhausted(ticket, timeout_s) from None
        redeem = functools.partial(pool.redeem, ticket, settings.deadline)
        if ticket.byte_size >= LONG_COPY:
            return (yield from offloaded(redeem, settings.left_s, _MAKING))
        try:
            return redeem()  # sooner than a thread could begin with it
        except TimeoutError:
            raise out_of_time(_MAKING) from None
    except BaseException:
        pool.withdraw(ticket)
        raise
