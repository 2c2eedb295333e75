"""A client process forks with results held. The child drops and collects all that it has, is refused, and ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from shm_backend_utils.client import ForkedError

from ..board import Phase
from ..connections import Connection
from ..kit import Kit
from ..models import MODELS
from .calls import infer

__all__ = ["forks"]

CHILD_S: Final = 10.0
NOT_REFUSED: Final = 3


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
