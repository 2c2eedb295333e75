"""The one table of a client process' workloads and how often each comes, with those of forks, threads and signals."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import numpy.typing as npt

from shm_backend_utils.client import ForkedError, Result
from shm_backend_utils.memory.descriptors import Descriptor

from ..kit import Connection, Kit
from ..models import MODELS, Model, Said
from ..process import Phase
from .calls import (
    attached,
    batches,
    bursts,
    compat,
    deadlines,
    forward,
    infer,
    prepare,
    reconnect,
    split,
    streams,
    strings,
    submit,
)

CHILD_S: Final = 10.0
NOT_REFUSED: Final = 3

THREADS: Final = 4
CALLS: Final = 5
USUAL_SWITCH_S: Final = 5e-3
TINY_SWITCH_S: Final = 1e-6

EARLIEST_S: Final = 1e-5
LATEST_S: Final = 2e-2
AGAIN_S: Final = 1e-4

EVERY_CLIENT: Final = ("ShmClient", "AsyncShmClient")
EVERY_PROTOCOL: Final = ("gRPC", "HTTP")


def forks(kit: Kit, connection: Connection) -> None:
    """Fork between a request and the reading of its answer; everything of the parent's must be as it was."""
    model = MODELS["halves"]
    payload, said = model.payload(kit.noise), kit.said(model)
    room = {model.sink: payload.nbytes}
    result = connection.caller.infer(model.name, {model.source: payload}, outputs=room, **said.options())
    kept = kit.check(connection, model, payload, said, result, "infer")
    with closing(connection.caller.prepare(model.name, {model.source: (payload.shape, payload.dtype)})) as call:
        call.inputs[model.source][:] = payload
        future = connection.caller.submit(model.name, {model.source: payload}, outputs=room, **said.options())
        held = [result, kept, future]
        runs_atexit = kit.chance.random() < 0.5
        kit.board.phase = Phase.ELSEWHERE
        child = os.fork()
        if child == 0:
            _be_a_child(connection, held, runs_atexit)
        status = _end_of(child)
        if status:
            kit.tally.add("forks that failed", _told(status))
        kit.check(connection, model, payload, said, result, "infer")  # the child has changed nothing
        kit.check(connection, model, payload, said, future.result(), "submit")
        kit.check(connection, model, payload, type(said)(), call.infer(), "prepare")
    infer(kit, connection)
    kit.tally.add("done", "forks")


def _be_a_child(connection: Connection, held: list[Any], runs_atexit: bool) -> None:
    """Do what a child does that knows nothing of its parent's client, and end."""
    status = 1
    try:
        held.clear()
        gc.collect()
        refused = _is_refused(connection.client)
        connection.forget()
        gc.collect()
        if runs_atexit:
            atexit._run_exitfuncs()
        status = 0 if refused else NOT_REFUSED
    finally:
        os._exit(status)


def _is_refused(client: Any) -> bool:
    """Return whether the child may not use its parent's client. No event loop runs in the child: it is its parent's."""
    with contextlib.suppress(ForkedError):
        _first_step(lambda: client.infer("halves", {}))
        return False
    return True


def _first_step(call: Callable[[], Any]) -> None:
    made = call()
    if hasattr(made, "send"):
        made.send(None)


def _end_of(child: int) -> int:
    """Return the exit status of a child; one that does not end is killed."""
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _told(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the child hung"
    return "the child could use its parent's client" if status == NOT_REFUSED else f"the child ended with {status}"


def threads(kit: Kit, connection: Connection) -> None:
    """Have each thread make calls of its own, some of them submitted and some prepared."""
    kit.board.phase = Phase.IN_FLIGHT
    work = [[_plan(kit) for _ in range(CALLS)] for _ in range(THREADS)]
    sys.setswitchinterval(TINY_SWITCH_S)
    try:
        with ThreadPoolExecutor(THREADS) as executor:
            futures = [executor.submit(_calls, connection.caller, plans) for plans in work]
            answers = [answer for future in futures for answer in future.result()]
    finally:
        sys.setswitchinterval(USUAL_SWITCH_S)
    for (way, model, payload, said), result in answers:
        kit.check(connection, model, payload, said, result, way)
        kit.tally.add("done", "tiny switch intervals")


Plan = tuple[str, Model, npt.NDArray[Any], Said]


def _plan(kit: Kit) -> Plan:
    model = MODELS[kit.chance.choice(("identity", "halves"))]
    return (
        kit.chance.choice(("infer", "submit")),
        model,
        kit.noise.words(most=1 << 16).view(_dtype(model)),
        kit.said(model),
    )


def _dtype(model: Model) -> str:
    return "float32" if model.name == "identity" else "uint32"


def _calls(caller: Any, plans: list[Plan]) -> list[tuple[Plan, Result]]:
    answers = []
    for plan in plans:
        way, model, payload, said = plan
        named = {"outputs": {model.sink: payload.nbytes}, **said.options()}
        if way == "submit":
            answers.append((plan, caller.submit(model.name, {model.source: payload}, **named).result()))
        else:
            answers.append((plan, caller.infer(model.name, {model.source: payload}, **named)))
    return answers


class SoakSignalError(Exception):
    """What SIGUSR1 raises here; SIGINT raises KeyboardInterrupt, as ever."""


class Signals:
    """Handlers of SIGINT and SIGUSR1 that raise only within :meth:`raise_in`, and once.

    They do not raise where Python itself loses something: in the module threading, as an interrupt within
    ``Condition.__enter__`` leaves the lock taken for ever, gRPC's too; and in the finalizer that closes a descriptor
    which an interrupt has taken from everybody: Python swallows what is raised there, and does not call it again.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self._connection: Connection | None = None
        self.has_raised = False  # whether they have, the last time
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def raise_in(
        self, work: Callable[[], None], number: signal.Signals, delay_s: float, connection: Connection | None
    ) -> None:
        """Do some work, with a signal on its way; what that raises ends the work, and is not seen by the caller."""
        self.has_raised = False
        self._connection = connection
        is_over = threading.Event()
        sender = threading.Thread(target=self._send, args=(number, delay_s, is_over))
        sender.start()
        try:
            try:
                self._is_armed = True
                work()
            finally:
                self._is_armed = False
        except (KeyboardInterrupt, SoakSignalError, asyncio.CancelledError):
            pass
        finally:
            is_over.set()
            sender.join()

    def _send(self, number: signal.Signals, delay_s: float, is_over: threading.Event) -> None:
        """Send the signal in a moment, and again where it could not raise."""
        while not is_over.wait(delay_s) and not self.has_raised:
            os.kill(os.getpid(), number)
            delay_s = AGAIN_S

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed or frame is None or self._loses_something(frame):
            return
        is_cancelled = None if self._connection is None else self._connection.interrupt()
        if is_cancelled is False:
            return
        self._is_armed = False
        self.has_raised = True
        if is_cancelled is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SoakSignalError

    def _loses_something(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename == threading.__file__ or frame.f_code is Descriptor.__del__.__code__


def moment(kit: Kit) -> float:
    """Return a delay, every magnitude as likely as any other."""
    return math.exp(kit.chance.uniform(math.log(EARLIEST_S), math.log(LATEST_S)))


@dataclass(frozen=True)
class Workload:
    """Something to do with a connection."""

    run: Callable[[Kit, Connection], None]
    weight: float  # how often it is done, against the others
    clients: tuple[str, ...] = EVERY_CLIENT  # which connections can do it
    protocols: tuple[str, ...] = EVERY_PROTOCOL
    may_be_interrupted: bool = True  # whether a signal may raise in the middle of it

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
