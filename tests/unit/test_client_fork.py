"""What a client's objects do in a forked child: nothing to the parent's memory, and nothing to its server.

Each test is a program of its own: forking pytest with its threads would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHM = Path("/dev/shm")
LONG_S = 60

# What every program begins with: a client, and `in_child`, which fails if the child wrote to shared memory or sent.
BEGIN = """
import gc, hashlib, os, sys
from pathlib import Path
import numpy as np
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of
from shm_backend_utils.client import ForkedError

X = np.arange(6, dtype=np.float32)

def compute(order, inputs):
    if order.model == "stream":
        return ({"OUT0": inputs["IN0"] * factor} for factor in range(6))
    return {"OUT0": inputs["IN0"] * 2}

def memory_of(process):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in Path("/dev/shm").glob(f"shmbu-{process}-*")}

def in_child(work):
    parent, before, sent = os.getpid(), memory_of(os.getpid()), len(server.orders)
    child = os.fork()
    if child == 0:
        work()
        gc.collect()
        if len(server.orders) != sent:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"
    assert memory_of(parent) == before, "the child wrote to its parent's memory"

def refused(use):
    try:
        use()
    except ForkedError as error:
        assert "is a fork; make a new one in this process" in str(error)
        return
    os._exit(4)

streams = config("stream", model_transaction_policy={"decoupled": True})
server = FakeServer(config("m"), streams, compute=compute)
connected = client_of(server)
client = connected.__enter__()
client.infer("m", {"IN0": X})
"""

PROGRAMS = {
    "every entry of a client is refused": """
        def work():
            refused(lambda: client.infer("m", {"IN0": X}))
            refused(lambda: client.submit("m", {"IN0": X}))
            refused(lambda: client.prepare("m", {"IN0": ((6,), np.float32)}))
            refused(lambda: next(iter(client.stream("stream", {"IN0": X}))))
            refused(lambda: client.explain("m"))
            refused(client.stats)
            client.close()
        in_child(work)
        assert (client.infer("m", {"IN0": X})["OUT0"] == 2 * X).all()
    """,
    "a prepared call is refused on every path": """
        calls = [client.prepare("m", {"IN0": ((6,), np.float32)}, path=path)
                 for path in ("direct", "triton-shm", "inline")]
        for call in calls:
            call.inputs["IN0"][:] = X
            call.infer()
        def work():
            for call in calls:
                refused(call.infer)
                call.close()
            calls.clear()
        in_child(work)
        for call in calls:
            assert (call.infer()["OUT0"] == 2 * X).all()
            call.close()
    """,
    "a result dies there without harm": """
        result = client.infer("m", {"IN0": X})
        def work():
            global result
            assert (result["OUT0"] == 2 * X).all()
            del result
        in_child(work)
        assert client.stats().slots_held == 1
        del result
    """,
    "frames of a stream die there and stay the parent's": """
        stream = client.stream("stream", {"IN0": X}, outputs={"OUT0": 24}, frames=3)
        frames = [next(stream), next(stream)]
        assert [frame.path for frame in frames] == ["direct"] * 2
        in_child(frames.clear)
        assert [float(frame["OUT0"][1]) for frame in frames] == [0.0, 1.0]
        frames.clear()
        assert [float(frame["OUT0"][1]) for frame in stream] == [2.0, 3.0, 4.0, 5.0]
    """,
    "a stream does not go on there": """
        stream = client.stream("stream", {"IN0": X}, outputs={"OUT0": 24}, frames=3)
        next(stream)
        def work():
            refused(lambda: next(stream))
        in_child(work)
        assert [float(frame["OUT0"][1]) for frame in stream] == [1.0, 2.0, 3.0, 4.0, 5.0]
    """,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_in_a_forked_child(program: str) -> None:
    body = "\n".join(line[8:] for line in program.splitlines())
    end = "connected.__exit__(None, None, None)\nserver.close()\n"
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", f"{BEGIN}{body}\n{end}"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, str(Path.cwd())])},
    ) as running:
        _, errors = running.communicate(timeout=LONG_S)
    left = list(SHM.glob(f"shmbu-{running.pid}-*"))
    for path in left:
        path.unlink(missing_ok=True)
    assert running.returncode == 0, errors
    assert left == []
