"""Forks while a region is made, of a process that has a harness, and of a model: the child has nothing of either."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shm_backend_utils.process import call_after_fork, owners_of_kind
from tests.unit.forks.programs import ENDINGS, run_program
from tests.unit.harness.folders import folder_of

# `making` makes a region in a thread, and forks when that comes to a certain function; the child finds what it has.
MAKING = """
    import threading
    from pathlib import Path
    from shm_backend_utils.memory.descriptors import PRIVATE
    from shm_backend_utils.memory.handover import server
    from shm_backend_utils.memory.managed import RegionKind
    from shm_backend_utils.memory.pool.slot import SlotRegion

    def files():
        found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists() or each.is_symlink()]
        return sorted(each for each in found if not each.startswith(("/proc/", "pipe:")))

    def making(kind, place, name):
        is_there, may_go_on, usual = threading.Event(), threading.Event(), getattr(place, name)

        def stopping(*arguments):
            outcome = usual(*arguments)
            is_there.set()
            may_go_on.wait()
            return outcome

        before = files()
        setattr(place, name, stopping)
        made = []
        make = lambda: made.append(SlotRegion(4096, 1, 4096, PRIVATE, kind=kind))
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        is_there.wait()
        setattr(place, name, usual)

        def work():
            assert files() == before, f"a child has {files()}, and before there was {before}"

        assert files() != before
        in_child(work)
        may_go_on.set()
        thread.join()
        made[0].destroy()
"""


@pytest.mark.parametrize(
    "kind_and_place",
    [
        *(f"{kind}, {place}" for kind in ("SYSTEM", "SEALED") for place in ("os, 'posix_fallocate'", "fcntl, 'fcntl'")),
        "SEALED, server, 'SealedKey'",
    ],
)
def test_a_child_has_no_region_that_is_just_being_made_nor_its_server(kind_and_place: str) -> None:
    run_program("os._exit", MAKING, "import fcntl", f"making(RegionKind.{kind_and_place})")


def test_a_child_has_no_copy_that_is_just_being_handed_over() -> None:
    run_program(
        "os._exit",
        MAKING,
        """
        from shm_backend_utils.memory.handover.server import REGISTRY

        region = SlotRegion(4096, 1, 4096, PRIVATE, kind=RegionKind.SEALED)
        (offer,) = REGISTRY._offers.values()
        copied = offer.copy()  # as the server's thread does

        def work():
            assert copied.fileno() == -1

        in_child(work)
        assert copied.fileno() >= 0
        region.destroy()
        """,
    )


CODE = """
    import os
    import pathlib
    import triton_python_backend_utils as pb_utils
    FINALIZED = pathlib.Path(__file__).with_name("finalized")
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())])]
        def finalize(self):
            FINALIZED.write_text(FINALIZED.read_text() + "once " if FINALIZED.exists() else "once ")
"""
PROGRAM = """
import numpy as np
from pathlib import Path
from shm_backend_utils.client import ForkedError, ShmClient
from shm_backend_utils.testing.harness import ModelHarness

X = {{"X": np.arange(4, dtype=np.float32)}}
folder = Path({folder!r})
finalized = folder / "1" / "finalized"

def sockets():
    return {{os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}}

def check():
    assert (harness.infer(X)["Y"] == X["X"]).all()
    with client.infer("m", X) as result:
        assert (result["Y"] == X["X"]).all()

def close():
    if {make!r} == "ModelHarness.in_child" and connection in sockets():
        os._exit(2)
    for use in (lambda: harness.infer(X), lambda: ShmClient(harness)):
        try:
            use()
        except ForkedError as error:
            assert "this ModelHarness belongs to the process that this one was forked from" in str(error)
        else:
            os._exit(3)
    client.close()
    harness.close()

with {make}(folder) as harness, ShmClient(harness) as client:
    check()
    if {make!r} == "ModelHarness.in_child":
        connection = os.readlink(f"/proc/self/fd/{{harness._open().model('m').instances[0]._connection.fileno()}}")
    in_child(close)
    in_child(lambda: None)
    assert not finalized.exists()
    check()
assert finalized.read_text() == "once "
"""


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", ["ModelHarness", "ModelHarness.in_child"])
def test_a_forked_child_leaves_its_parents_models_alone(tmp_path: Path, make: str, ending: str) -> None:
    run_program(ending, PROGRAM.format(folder=str(folder_of(tmp_path, CODE)), make=make))


class Owned:
    def after_fork(self) -> None:
        pass


@pytest.mark.usefixtures("switching_often")
def test_owners_are_found_while_others_come_and_go() -> None:
    def come_and_go(_: int) -> None:
        for _ in range(2000):
            call_after_fork(Owned())

    kept = Owned()
    call_after_fork(kept)
    with ThreadPoolExecutor(4) as threads:
        coming = [threads.submit(come_and_go, number) for number in range(3)]
        while not all(each.done() for each in coming):
            assert kept in owners_of_kind(Owned)
    for each in coming:
        each.result()
    assert owners_of_kind(Owned) == [kept]


# What every program begins with: a client's region in this process, and a way to have processes wait.
BEGIN = """
import os, signal, traceback
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.descriptors import PRIVATE, Descriptor
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.shared_file import SealedFile, SharedFile

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
