"""One client of the soak: sends checked requests until its standard input ends, and tells what it saw."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from shm_backend_utils.client import CopyWarning, ServerUnavailableError
from shm_backend_utils.errors import ShmError

from ...processes import open_files
from .calls import WORKLOADS, PlainClientError, Workload, choose, do
from .kit import LONGEST_HELD, Kit
from .process import Phase, become, hears, held_memory, page
from .signals import Signals
from .tally import FOREIGN_ERRORS, LEAKS, UNCAUGHT_ERRORS


def step(kit: Kit, signals: Signals, workloads: Sequence[Workload]) -> str:
    """Do one thing at random; count what went wrong with it, and return its name."""
    workload, connection = choose(kit, workloads)
    try:
        do(kit, workload, connection, signals)
    except Exception as error:  # any error: this package must raise only its own
        kit.tally.add_error(error, "errors" if isinstance(error, ShmError | PlainClientError) else FOREIGN_ERRORS)
        time.sleep(0.05 if isinstance(error, ServerUnavailableError) else 0)
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        kit.enter(Phase.ELSEWHERE)
    return ""


def close(kit: Kit, descriptors: int) -> None:
    """Release everything, and count what is still held, apart from so many descriptors."""
    kit.pass_call(count=LONGEST_HELD)
    deadline = time.monotonic() + 10.0
    while (count := sum(each.quarantined() for each in kit.connections)) and time.monotonic() < deadline:
        time.sleep(0.05)
    kit.tally.add(LEAKS, "quarantined slots", count)
    for connection in kit.connections:
        connection.close()
    gc.collect()
    for leak in held_memory("self"):
        kit.tally.add(LEAKS, leak)
    grown = len(open_files("self")) - descriptors
    if grown > 32:  # gRPC keeps some for its pollers
        kit.tally.add(LEAKS, f"{grown} descriptors")


def main(grpc_url: str, http_url: str, seed: int, page_fd: int, uid: int, models: Sequence[str]) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore", CopyWarning)  # what overflows here is meant to
    kit = Kit({"gRPC": grpc_url, "HTTP": http_url}, seed, page(page_fd))
    signals, descriptors = Signals(), len(open_files("self"))

    def note(unraisable: Any) -> None:
        """Count what is raised where nobody can catch it, but for what the signals raise there."""
        if not signals.has_raised:
            kit.tally.add_error(unraisable.exc_value, UNCAUGHT_ERRORS)

    sys.unraisablehook = note
    workloads: Sequence[Workload] = WORKLOADS
    if models:
        workloads = (Workload(lambda kit, connection: kit.infer(connection, kit.request(models, 1 << 17))),)
        for connection in kit.connections:  # the costs of first requests are nobody's attack
            workloads[0].run(kit, connection)
        kit.tally.take()
    if uid != os.geteuid():  # all that is imported late has been read
        for connection in kit.connections:
            connection.close()
        become(uid)
    due = time.monotonic()
    answers: list[tuple[float, float, str]] = []
    error = ""
    while not hears((0.1 if error else 0.008) if models else 0.0):
        began = time.monotonic()
        error = step(kit, signals, workloads)
        answers += [(began, time.monotonic() - began, error)] if models else []
        if time.monotonic() >= due:
            print(json.dumps([kit.tally.take(), answers]), flush=True)
            answers, due = [], time.monotonic() + 0.25
    close(kit, descriptors)
    print(json.dumps([kit.tally.take(), answers]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
