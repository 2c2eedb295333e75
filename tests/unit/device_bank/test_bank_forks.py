"""A forked child owns nothing of its parent's device memory."""

from __future__ import annotations

import textwrap

import pytest

from tests.unit.gpus import run_in_a_process

FORKING = """
import os, threading
from pathlib import Path
from shm_backend_utils.gpu.memory.bank import DeviceBank
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import in_forked_child

freeing, go_on = threading.Event(), threading.Event()
driver = FakeDriver.load()
cuda = driver.runtime()
free = cuda.free

def free_slowly(address, device):
    freeing.set()
    go_on.wait(20)
    free(address, device)

def collect_all():
    while bank.collect():
        pass

cuda.free = free_slowly
bank = DeviceBank(CudaAccess(lambda: cuda), None)
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

USES = {
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
        assert driver.live().allocations == 2
        collect_all()
        assert driver.live().allocations == 1
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
        while driver.live().allocations > 1:
            pass
    """,
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child(use: str) -> None:
    program = FORKING + textwrap.indent(textwrap.dedent(USES[use]), "    ") + END
    run_in_a_process(program)
