"""Who waits for a region: tickets, which are granted in the order in which they came."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections import deque
from dataclasses import dataclass

from ...errors import ClosedError
from .inventory import Inventory, Promise
from .need import Need
from .slot import SlotRegion

__all__ = ["Grant", "Ticket", "TicketQueue"]

Grant = SlotRegion | Promise
"""An idle region, or permission to make a new one."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request for a region, in the queue or granted."""

    need: Need
    byte_size: int  # of the whole region, if one is made
    holder: object  # who asks; its text names it to people
    granted: concurrent.futures.Future[Grant]


class TicketQueue:
    """Tickets that wait, first come, first served, and those granted and not redeemed yet. A pool adds a lock.

    It keeps none of them alive: a ticket that an interrupt has taken from its holder gives back what it was granted.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self.granted: dict[weakref.ref[Ticket], Grant] = {}
        self.waiting: deque[weakref.ref[Ticket]] = deque()  # whether there are any may be looked at without the lock

    def serve(self) -> None:
        """Grant what can be granted, in order."""
        for reference in list(self.granted):
            if reference() is None:
                self._take_back(self.granted.pop(reference))
        while self.waiting:
            ticket = self.waiting[0]()
            if ticket is None:
                self.waiting.popleft()
                continue
            grant = self._grant(ticket)
            if grant is None:
                return
            self.granted[weakref.ref(ticket)] = grant  # first: whatever is raised from here on, it can be taken back
            self.waiting.popleft()
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_result(grant)
            else:
                self._take_back(self.granted.pop(weakref.ref(ticket)))

    def redeem(self, ticket: Ticket) -> None:
        """Leave to its holder what a ticket was granted; raises ClosedError if that was taken back."""
        if self.granted.pop(weakref.ref(ticket), None) is None:
            raise ClosedError("this client")

    def withdraw(self, ticket: Ticket) -> None:
        """Give up a ticket, granted or not. Nothing happens if it was redeemed."""
        reference = weakref.ref(ticket)
        with contextlib.suppress(ValueError):
            self.waiting.remove(reference)
        grant = self.granted.pop(reference, None)
        if grant is not None:
            self._take_back(grant)

    def clear(self) -> None:
        """Take back what was granted, and fail whoever waits."""
        while self.granted:
            self._take_back(self.granted.popitem()[1])
        for reference in self.waiting:
            ticket = reference()
            if ticket is not None and ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(ClosedError("this client"))
        self.waiting.clear()

    def _grant(self, ticket: Ticket) -> Grant | None:
        need = ticket.need
        region = self._inventory.take(need.byte_size, need[1:])
        if region is not None:
            region.holder = ticket.holder
            return region
        return self._inventory.promise(ticket.byte_size, need[1:])

    def _take_back(self, grant: Grant) -> None:
        if isinstance(grant, SlotRegion):
            grant.holder = None
            self._inventory.returned.append(grant)
        else:
            self._inventory.unpromise(grant)
