"""Taking regions of a client's pool for its calls: at once, or when there is room."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import BudgetError, MachineError
from ...memory.kinds import RegionKind
from ...memory.pool.need import Need
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import SlotRegion
from ...memory.pool.tickets import Ticket
from ...protocol.layout import data_offset
from ..errors import DeadlineExceededError, out_of_time
from ..known_model import KnownModel
from ..settings import CallSettings
from ..steps import Steps, Wait, offloaded
from .exchange import LONG_COPY
from .further import HostMemory
from .triton_shm import RegisteredExchange

__all__ = ["Memory", "Taking"]

_MAKING: Final = "its memory was being made"
Memory = npt.NDArray[np.uint8]
"""A whole region. When it, and all arrays made from it, are gone, the region is given back."""


class Taking:
    """Takes regions of one client's pool."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    def take(
        self, settings: CallSettings, known: KnownModel, end: int, slot_count: int, group: str
    ) -> Steps[tuple[SlotRegion, Memory]]:
        """Take a region for a model's calls, whose last tensor ends at ``end``, until the deadline.

        It is given back when the array, which is the whole region, and all arrays made from it are gone. Regions of
        different groups are never exchanged. PoolExhaustedError if there is no memory now, BudgetError if there never
        will be, MachineError if this machine has none.
        """
        size = known.record_byte_size
        kind = RegionKind.SYSTEM if group == RegisteredExchange.path else known.kind
        need = Need(end - data_offset(slot_count, size), slot_count, size, group, kind)
        return self._pool.take_idle(need, settings.origin) or (yield from self.wait_for(settings, need))

    def take_at_once(self, settings: CallSettings, need: Need) -> Steps[tuple[SlotRegion, Memory] | None]:
        """Take a region if there is room for it now; else return None."""
        taken = self._pool.take_idle(need, settings.origin)
        if taken is not None:
            return taken
        try:
            ticket = self._pool.request_at_once(need, settings.origin)
            return None if ticket is None else (yield from self._redeem(settings, ticket))
        except (BudgetError, MachineError):
            return None

    def take_more(self, settings: CallSettings, known: KnownModel, byte_size: int) -> Steps[HostMemory | None]:
        """Take a region beside a call's own, with so many bytes of data, if there is room for it now; else None."""
        need = Need(byte_size, 1, known.record_byte_size, "direct, beside", known.kind)
        try:
            taken = yield from self.take_at_once(settings, need)
        except DeadlineExceededError:
            return None
        return None if taken is None else HostMemory(*taken)

    def wait_for(self, settings: CallSettings, need: Need) -> Steps[tuple[SlotRegion, Memory]]:
        """Wait in the pool's order for a region, as none lies idle. Returns and raises as :meth:`take`."""
        return (yield from self._redeem(settings, self._pool.request(need, settings.origin)))

    def _redeem(self, settings: CallSettings, ticket: Ticket) -> Steps[tuple[SlotRegion, Memory]]:
        try:
            if not ticket.granted.done():
                timeout_s = settings.left_s
                try:
                    yield Wait(ticket.granted, timeout_s)
                except TimeoutError:
                    raise self._pool.exhausted(ticket, timeout_s) from None
            redeem = functools.partial(self._pool.redeem, ticket, settings.deadline)
            if ticket.byte_size >= LONG_COPY:
                return (yield from offloaded(redeem, settings.left_s, _MAKING))
            try:
                return redeem()  # sooner than a thread could begin with it
            except TimeoutError:
                raise out_of_time(_MAKING) from None
        except BaseException:
            self._pool.withdraw(ticket)
            raise
