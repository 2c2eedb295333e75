"""What a client process does with forks and threads: everything of the parent's, and of each thread, stays right."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NoReturn

from shm_backend_utils.client import ForkedError, Result

from .kit import Connection, Kit
from .models import Request
from .process import Phase
from .tally import HANGS


def forks(kit: Kit, connection: Connection) -> None:
    """Fork between a request and the reading of its answer; everything of the parent's must be as it was."""
    request = kit.request(("halves",))
    result = connection.caller.infer(*request.inputs, **request.options)
    kept = kit.check(connection, request, result, "infer")
    with closing(kit.prepared(connection, request)) as call:
        call.inputs["X"][:] = request.payload
        future = connection.caller.submit(*request.inputs, **request.options)
        runs_atexit = kit.chance.random() < 0.5
        kit.enter(Phase.ELSEWHERE)
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(30, exit=True)  # tells where it hangs
            del result, kept, future
            _be_a_child(connection, runs_atexit)
        _, status = os.waitpid(child, 0)
        if status:
            kit.tally.add(HANGS, f"a fork ended with {os.waitstatus_to_exitcode(status)}")
        kit.check(connection, request, result, "infer")  # the child has changed nothing
        kit.check(connection, request, future.result(), "submit")
        kit.check(connection, request, call.infer(), "prepare")
    kit.infer(connection, kit.request())
    kit.tally.add("done", "forks")


def _be_a_child(connection: Connection, runs_atexit: bool) -> NoReturn:
    """Do what a child does that knows nothing of its parent's client, and end."""
    status = 2  # of an exception; a child that hangs ends with 1
    try:
        gc.collect()
        refused = _is_refused(connection.client)
        connection.forget()
        gc.collect()
        if runs_atexit:
            atexit._run_exitfuncs()
        status = 0 if refused else 3
    finally:
        os._exit(status)


def _is_refused(client: Any) -> bool:
    """Return whether the child may not use its parent's client. No event loop runs in the child: it is its parent's."""
    with contextlib.suppress(ForkedError):
        made = client.infer("halves", {})
        if hasattr(made, "send"):
            made.send(None)
        return False
    return True


def threads(kit: Kit, connection: Connection) -> None:
    requests = [kit.request(("identity", "halves"), 1 << 16) for _ in range(20)]
    ways = kit.chance.choices(("infer", "submit"), k=20)
    caller: Any = connection.caller
    kit.enter(Phase.IN_FLIGHT)

    def call(request: Request, way: str) -> Result:
        made = getattr(caller, way)(*request.inputs, **request.options)
        result: Result = made if way == "infer" else made.result()
        return result

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            results = list(executor.map(call, requests, ways))
    finally:
        sys.setswitchinterval(usual_s)
    for request, way, result in zip(requests, ways, results, strict=True):
        kit.check(connection, request, result, way)
        kit.tally.add("done", "tiny switch intervals")
