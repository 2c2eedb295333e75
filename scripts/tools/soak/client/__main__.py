"""One client of the soak: sends checked requests until its standard input ends, and tells what it saw."""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
import warnings
from typing import Any, Final

from shm_backend_utils.client import CopyWarning, ServerUnavailableError
from shm_backend_utils.errors import ShmError

from ...processes import open_files
from ..machine import held_sealed_memory, held_shared_memory
from .kit import Kit
from .process import Board, Phase, stop_event
from .workloads.calls import ATTACHED_PREFIX, PlainClientError
from .workloads.table import Signals, choose, interrupt

REPORT_INTERVAL_S: Final = 0.25
QUARANTINE_WAIT_S: Final = 10.0
MOST_DESCRIPTORS_LEFT: Final = 32
"""gRPC keeps some for its pollers."""


class SoakClient:
    """A loop of random deeds over connections that are never renewed because of an error."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._signals = Signals()
        self._descriptors = len(open_files("self"))
        sys.unraisablehook = self._note_unraisable

    def step(self) -> None:
        """Do one deed; count what went wrong with it."""
        kit = self._kit
        workload, is_interrupted = choose(kit.chance)
        connection = kit.chance.choice([each for each in kit.connections.all if workload.takes(each)])
        try:
            if is_interrupted:
                interrupt(self._signals, workload, kit, connection)
            else:
                workload.run(kit, connection)
        except ServerUnavailableError as error:
            kit.tally.add_error(error)
            connection.is_lost = True
            time.sleep(0.05)
        except (ShmError, PlainClientError) as error:
            kit.tally.add_error(error)
        except Exception as error:  # whatever it is: this package has errors of its own for everything
            kit.tally.add_error(error, "foreign errors")
        kit.board.phase = Phase.ELSEWHERE

    def observe(self) -> None:
        """Count what is not to grow."""
        kit = self._kit
        kit.tally.add("descriptors", str(len(open_files("self"))))
        kit.tally.add("quarantine while running", str(kit.connections.quarantined()))

    def close(self) -> None:
        """Give everything up, and count what is still held then."""
        kit = self._kit
        kit.tally.add("wrong bytes", "a view that was held", kit.held.drop())
        deadline = time.monotonic() + QUARANTINE_WAIT_S
        while kit.connections.quarantined() and time.monotonic() < deadline:
            time.sleep(0.05)
        kit.tally.add("quarantine at the end", "slots", kit.connections.quarantined())
        kit.connections.close()
        gc.collect()
        leaks = held_sealed_memory("self")
        for marker in ("shmbu-", ATTACHED_PREFIX):
            leaks += held_shared_memory("self", marker)
        for leak in leaks:
            kit.tally.add("leaked by clients", leak)
        grown = len(open_files("self")) - self._descriptors
        if grown > MOST_DESCRIPTORS_LEFT:
            kit.tally.add("leaked by clients", f"{grown} descriptors")

    def _note_unraisable(self, unraisable: Any) -> None:
        """Count what is raised where nobody can catch it, but for what this program's own signals raise there."""
        if not self._signals.has_raised:
            self._kit.tally.add_error(unraisable.exc_value, "errors that nobody could catch")


def main(grpc_url: str, http_url: str, seed: int, board_fd: int) -> None:
    """Run the client; the board's descriptor is inherited."""
    faulthandler.enable()
    warnings.simplefilter("ignore", CopyWarning)  # what overflows here is meant to
    stop = stop_event()
    kit = Kit({"grpc": grpc_url, "http": http_url}, seed, Board(board_fd))
    client = SoakClient(kit)
    due = time.monotonic()
    while not stop.is_set():
        client.step()
        if time.monotonic() >= due:
            client.observe()
            print(kit.tally.take(), flush=True)
            due = time.monotonic() + REPORT_INTERVAL_S
    client.close()
    print(kit.tally.take(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
