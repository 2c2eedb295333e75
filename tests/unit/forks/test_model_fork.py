"""A worker that model.py forks holds nothing of its model: no memory that it borrowed, no slot of a model that died."""

from __future__ import annotations

import pytest

from tests.unit.forks.programs import run_program

# What every program begins with: a client's region in this process, and a way to have processes wait.
BEGIN = """
import os, signal, traceback
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.sealed_file import SealedFile
from shm_backend_utils.memory.shared_file import SharedFile

client = SlotRegion(4096, 1, 4096, PRIVATE, kind=RegionKind("{kind}"))
slot = client.slots[0]
slot.begin(b"")
handed_over = os.dup(client.fd)

def system():
    return SharedFile.open(client.key, "the region")

def sealed():
    return SealedFile.take(client.key, Descriptor(os.dup, handed_over), "the region")

def opened():
    with {kind}() as file:
        return ManagedRegion.map(file, client.token)

alive, *lifeline = os.pipe()

def wait():
    os.read(alive, 1)  # ends when the test's process does

def fork(work=wait):
    is_ready, ready = os.pipe()
    child = os.fork()
    if child == 0:
        while lifeline:
            os.close(lifeline.pop())
        os.write(ready, b"1")
        try:
            work()
        finally:
            traceback.print_exc()
            os._exit(1)
    os.read(is_ready, 1)
    return child

def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""

PARTS = {
    "what was borrowed": """
        model = opened()
        lease = locks.borrow(model.segment.fileno(), model.record_offset(0))
        worker = fork()
        lease.give_back()
        model.close()
        slot.state = "sent"
        assert slot.reclaim(), "the worker has the slot borrowed"
        end(worker)
    """,
    "a slot of a model that dies": """
        read, write = os.pipe()

        def execute():
            model = opened()
            assert model.lease(0).take()
            os.write(write, str(fork()).encode())
            wait()

        model = fork(execute)
        worker = int(os.read(read, 99))
        slot.state = "sent"
        assert not slot.reclaim(), "the model is executing"
        end(model)
        assert slot.reclaim(), "the worker has the slot's lease"
        os.kill(worker, signal.SIGKILL)
    """,
    "a slot that it gives back at its end": """
        model = opened()
        lease = model.lease(0)
        assert lease.take()

        def lose():
            lease.give_back()

        os.waitpid(fork(lose), 0)
        slot.state = "sent"
        assert not slot.reclaim(), "the worker gave back the lease of its model"
        lease.give_back()
        assert slot.reclaim()
        model.close()
    """,
}


@pytest.mark.parametrize("kind", ["system", "sealed"])
@pytest.mark.parametrize("part", PARTS)
def test_a_forked_worker_does_not_hold(part: str, kind: str) -> None:
    run_program("os._exit", BEGIN.format(kind=kind), PARTS[part], "client.destroy()")
