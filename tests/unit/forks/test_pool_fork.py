"""A forked child of a client's process: it may not use the client's memory, and does it no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shm_backend_utils.memory.locks import is_owner_alive
from tests.unit.forks.programs import run_program

SHM = Path("/dev/shm")
LONG_S = 60

# What every program begins with: a pool, one region that is idle, and one that is held by `memory`.
BEGIN = """
import signal, threading
from shm_backend_utils.client import PoolOptions
from shm_backend_utils.process import Origin
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.pool import SlotPool

def take():
    return pool.take_granted(pool.request(Need(1), Origin.here("take")))

pool = SlotPool(PoolOptions(max_bytes=2**20))
held, memory = take()
memory[-1] = 42
idle, to_be_idle = take()
del to_be_idle
"""

WAITING = """
del memory
pool.close()
pool = SlotPool(PoolOptions(max_bytes=held.byte_size))
only, memory = take()
waiter = pool.request(Need(1), Origin.here("take"))
thread = threading.Thread(target=waiter.granted.result, args=(30,))
thread.start()
in_child(pool.close)
assert not waiter.granted.done()
del memory
thread.join()
assert pool.take_granted(waiter)[0] is only
pool.close()
os._exit(0)
"""


def test_a_fork_while_a_thread_waits_for_memory_does_no_harm() -> None:
    run_program("sys.exit", BEGIN, WAITING)


# The child tells that it runs, waits until its standard input ends, and only then exits. The parent does not live to
# see it: it is killed as soon as its child runs.
ORPHAN = """
running, is_running = os.pipe()
if os.fork() == 0:
    os.write(is_running, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(running, 1)
print(region.key, flush=True)
signal.pause()
"""
# Another thread is just making a region, for which one that was idle makes room; it stops where `stop` is called.
MAKING = """
del memory
pool.close()
pool = SlotPool(PoolOptions(max_bytes=2**17))
region, memory = take()
del memory
reached = threading.Event()

def stop(stopped_at):
    global region
    region = stopped_at
    reached.set()
    signal.pause()

inventory = pool._inventory
inventory.{} = lambda {}: stop({})
need = Need(2**17 - 2 * 4096)
threading.Thread(target=lambda: pool.take_granted(pool.request(need, "take"))).start()
reached.wait(30)
"""
STATES = {
    "idle": "region = idle",
    "held": "region = held",
    "making room for another": MAKING.format("_unlink", "region", "region"),
    "just made": MAKING.format("add", "made, *_", "made[0]"),
}


@pytest.mark.parametrize("state", STATES.values(), ids=list(STATES))
def test_the_lease_goes_when_the_parent_dies_although_its_child_lives(state: str) -> None:
    program_text = "\n".join(["import os, sys", BEGIN, state, ORPHAN])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program_text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        # Opened before the parent dies: from then on, any process that looks for dead ones' memory may remove the name.
        fd = os.open(SHM / program.stdout.readline().strip(), os.O_RDWR)
        try:
            assert is_owner_alive(fd)
            program.kill()
            program.wait(LONG_S)
            assert not is_owner_alive(fd)
        finally:
            os.close(fd)
            program.kill()
            for path in SHM.glob(f"shmbu-{program.pid}-*"):
                path.unlink(missing_ok=True)
