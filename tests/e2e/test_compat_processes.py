"""A client of registered models in processes of its own: they exit, they fork, they are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tritonclient.grpc

from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.server import EmbeddedServer

from .eventually import eventually
from .two_classes import ROWS

SHM = Path("/dev/shm")
LONG_S = 60

# What every program begins with: a client with a model of each kind, which has called them.
BEGIN = """
import os, signal, sys, threading, time
import numpy as np
from shm_backend_utils.client import ForkedError
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient

client = TritonSHMClient(sys.argv[1])
client.register_shm_model("rows", [("X", (4,), np.float32)], [("DOUBLED", (4,), np.float32)], 4, 2)
client.register_shm_model(
    "ordinary", [("X", (4,), np.float32), ("N", (1,), np.int64)], [("Y", (4,), np.float32)], 4, 2
)

def infer(count=10):
    x = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
    rows = client.infer_shm("rows", {"X": x})["DOUBLED"]
    ordinary = client.infer_shm("ordinary", {"X": x, "N": np.full((count, 1), 2)})["Y"]
    assert np.array_equal(rows, 2 * x) and np.array_equal(ordinary, 2 * x)

infer()

def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def is_refused(count):
    try:
        infer(count)
    except InferShmError as error:
        assert isinstance(error.__cause__, ForkedError), repr(error.__cause__)
    else:
        sys.exit("no error")
"""

ENDS = {
    "is interrupted": """
client.register_shm_model("late_writer", [("VALUE_AND_DELAY_US", (), np.int64)], [("VALUES", (256,), np.int64)], 2, 2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have it ignored
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    client.infer_shm("late_writer", {"VALUE_AND_DELAY_US": [1, 600_000] * 4})
except KeyboardInterrupt:
    infer()
else:
    sys.exit("no interrupt")
""",
    "exits": "",
    "exits without the client": "del client",
    "exits in the middle": "sys.exit(0)",
    "fails": "raise SystemExit(0) from RuntimeError('by intent')",
    "forks": """
assert in_child(lambda: None) == 0
infer()
""",
    "forks, and the child calls": """
assert in_child(lambda: is_refused(1)) == 0
assert in_child(lambda: is_refused(10)) == 0
infer()
""",
    "forks while all memory is in use, and the child calls": """
model = client.registered_models["rows"]
holders = [threading.Thread(target=infer, args=(2000,)) for _ in range(4)]
for holder in holders:
    holder.start()
assert in_child(lambda: is_refused(1)) == 0
for holder in holders:
    holder.join()
infer()
""",
    "forks, and the child cleans up": """
assert in_child(client.cleanup_all_shm) == 0
infer()
""",
}


def run(server: EmbeddedServer, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + end, server.grpc_url])


def left_by(process: subprocess.Popen[bytes], server: EmbeddedServer) -> tuple[list[str], list[str]]:
    """Return what is in /dev/shm, and what is registered at the server."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        known = client.get_system_shared_memory_status(as_json=True).get("regions", {})
    prefix = f"shmbu-{process.pid}-"
    return [path.name for path in SHM.glob(f"{prefix}*")], [name for name in known if name.startswith(prefix)]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_it_leaves_nothing(triton_server: EmbeddedServer, end: str) -> None:
    with run(triton_server, end) as process:
        assert process.wait(LONG_S) == 0
    assert left_by(process, triton_server) == ([], [])


def test_what_a_killed_one_leaves_goes_with_the_next_client(triton_server: EmbeddedServer) -> None:
    is_there = "assert [name for name in os.listdir('/dev/shm') if name.startswith(f'shmbu-{os.getpid()}-')]"
    with run(triton_server, f"{is_there}\nos.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(LONG_S) == -signal.SIGKILL
    with TritonSHMClient(triton_server.grpc_url) as client:
        ROWS.register(client)
        eventually(lambda: left_by(process, triton_server)[0] == [])  # another client may be at it
        for name in left_by(process, triton_server)[1]:
            unregister_when_free(partial(client.unregister_system_shared_memory, name))
