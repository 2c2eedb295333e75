"""A forked child owns nothing of its parent's device memory, and waits for none of its parent's threads."""

from __future__ import annotations

import textwrap

import pytest

from tests.unit.gpu.fakes import run_in_a_process

PRELUDE = """
import os, threading
from pathlib import Path
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.bank import DeviceBank
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.ordering import OwnStreams
from shm_backend_utils.memory.descriptors import PRIVATE
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from tests.unit.gpu.fakes import CLIENT, DRIVER, in_forked_child

gpu = DRIVER.runtime()
"""

SHARED = """
peer = DRIVER.runtime(CLIENT)
allocation = CudaAllocation(gpu, 1, 1)
mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None, allocation.event_handle)
streams = OwnStreams(peer)
streams.give_back(streams.borrow(1), 1)
"""

USES_OF_MEMORY = {
    "lets go of nothing that is its parent's": """
        def work():
            global mapping, streams, allocation
            mapping.close()
            allocation.free()
            del mapping, streams, allocation
            assert not peer.retired.is_waiting and not gpu.retired.is_waiting
        in_forked_child(work)
        assert DRIVER.live().opened == 1 and DRIVER.live().allocations == 1
    """,
    "does nothing that its parent has to do": """
        done = []
        gpu.retired.add(1, lambda: done.append("work"))
        def work():
            assert not gpu.retired.collect()
            assert done == []
        in_forked_child(work)
        while gpu.retired.collect():
            pass
        assert done == ["work"]
    """,
    "waits for no lock that its parent's other threads had": """
        held, go_on = threading.Event(), threading.Event()
        def hold():
            with gpu.retired._lock, gpu._lock:
                held.set()
                go_on.wait(20)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        def work():
            assert not gpu.retired.collect()
            try:
                with gpu.on(0):
                    raise AssertionError("CUDA works in a forked child")
            except CudaError as error:
                assert "was forked from one that uses CUDA" in str(error), error
        in_forked_child(work)
        go_on.set()
        thread.join()
    """,
}


@pytest.mark.parametrize("use", USES_OF_MEMORY)
def test_a_forked_child_of_one_that_shares_memory(use: str) -> None:
    run_in_a_process(PRELUDE + SHARED + textwrap.dedent(USES_OF_MEMORY[use]))


BANK = """
freeing, go_on = threading.Event(), threading.Event()
free = gpu.free

def free_slowly(address, device):
    freeing.set()
    go_on.wait(20)
    free(address, device)

def collect_all():
    while bank.collect():
        pass

gpu.free = free_slowly
bank = DeviceBank(CudaAccess(lambda: gpu), None)
regions = [SlotRegion(100, 1, 4096, PRIVATE) for _ in range(2)]
for region in regions:
    bank.provide(region, [0], [100])

inodes = {region: (Path("/dev/shm") / region.key).stat().st_ino for region in regions}

def descriptors(region):
    places = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(place.stat().st_ino == inodes[region] for place in places if place.exists())

try:
"""

END = """
finally:
    go_on.set()
    for region in regions:
        region.destroy()
    bank.close()
"""

USES_OF_A_BANK = {
    "holds none of the regions that its parent has destroyed": """
        user = use(regions[0]._region.segment.fileno())
        regions[0].destroy()
        def work():
            assert descriptors(regions[0]) == 0
        in_forked_child(work)
        user.give_back()
    """,
    "ends although its parent was freeing memory": """
        for region in regions:
            region.destroy()
        collecting = threading.Thread(target=collect_all)
        collecting.start()
        assert freeing.wait(20)
        in_forked_child(lambda: None)
        go_on.set()
        collecting.join()
    """,
    "frees nothing": """
        go_on.set()
        regions[0].destroy()
        in_forked_child(bank.close)
        assert DRIVER.live().allocations == 2
        collect_all()
        assert DRIVER.live().allocations == 1
    """,
    "gives up nothing of its parent's when that was waiting for models": """
        go_on.set()
        user = use(regions[0]._region.segment.fileno())
        regions[0].destroy()
        bank.close()
        def work():
            assert not bank.collect()
            bank.abandon()
            assert not [thread for thread in threading.enumerate() if thread.name == "shm device memory"]
        in_forked_child(work)
        user.give_back()
        while DRIVER.live().allocations > 1:
            pass
    """,
}


@pytest.mark.parametrize("use", USES_OF_A_BANK)
def test_a_forked_child_of_one_that_has_a_bank(use: str) -> None:
    run_in_a_process(PRELUDE + BANK + textwrap.indent(textwrap.dedent(USES_OF_A_BANK[use]), "    ") + END)
