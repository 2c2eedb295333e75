"""The one table of what a client process does, and how often."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..connections import Connection
from ..kit import Kit
from .calls import batches, bursts, deadlines, forward, infer, prepare, reconnect, split, submit
from .forks import forks
from .registered import attached, compat
from .signals import Signals, moment
from .streams import streams
from .strings import strings
from .threads import threads

__all__ = ["WORKLOADS", "Workload", "choose", "interrupt"]

EVERY_CLIENT: Final = ("ShmClient", "AsyncShmClient")
EVERY_PROTOCOL: Final = ("gRPC", "HTTP")


@dataclass(frozen=True)
class Workload:
    """Something to do with a connection.

    Attributes
    ----------
    run : callable
    weight : float
        How often it is done, against the others.
    clients, protocols : tuple of str
        Which connections can do it.
    may_be_interrupted : bool
        Whether a signal may raise in the middle of it.
    """

    run: Callable[[Kit, Connection], None]
    weight: float
    clients: tuple[str, ...] = EVERY_CLIENT
    protocols: tuple[str, ...] = EVERY_PROTOCOL
    may_be_interrupted: bool = True

    def takes(self, connection: Connection) -> bool:
        """Return whether it can be done with a connection."""
        return connection.kind in self.clients and connection.protocol in self.protocols


WORKLOADS: Final = (
    Workload(infer, 40),
    Workload(bursts, 12),
    Workload(prepare, 20),
    Workload(submit, 10),
    Workload(split, 3),
    Workload(batches, 4),
    Workload(strings, 8),
    Workload(streams, 6, protocols=("gRPC",)),
    Workload(forward, 8),
    Workload(compat, 1, clients=("ShmClient",), protocols=("gRPC",)),
    Workload(attached, 2, may_be_interrupted=False),  # an interrupt would leave memory that is the user's to remove
    Workload(deadlines, 1.5),
    Workload(reconnect, 0.5, may_be_interrupted=False),
    Workload(threads, 1, clients=("ShmClient",), may_be_interrupted=False),
    Workload(forks, 0.7, may_be_interrupted=False),
)
SHARE_INTERRUPTED: Final = 0.04


def choose(chance: random.Random) -> tuple[Workload, bool]:
    """Return what to do next, and whether to interrupt it."""
    (workload,) = chance.choices(WORKLOADS, [each.weight for each in WORKLOADS])
    return workload, workload.may_be_interrupted and chance.random() < SHARE_INTERRUPTED


def interrupt(signals: Signals, workload: Workload, kit: Kit, connection: Connection) -> None:
    """Do something while a signal is on its way."""
    number = kit.chance.choice((signal.SIGINT, signal.SIGUSR1))
    connection.connect()
    try:
        signals.raise_in(lambda: workload.run(kit, connection), number, moment(kit), connection)
    finally:
        if signals.has_raised:
            kit.tally.add("done", "signals at points")
            kit.tally.add("signals", f"{number.name}, {workload.run.__name__}")
