"""Device memory of another process of the operating system, which may be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings, device_with
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, SIZE, reason_against, whole
from tests.unit.gpus import collect_all

OWNER = f"""
import sys
import numpy as np
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

driver = FakeDriver.load()
cuda = driver.runtime()
allocation = CudaAllocation(cuda, {SIZE}, {DEVICE})
array = driver.memory(allocation.address, ({SIZE},), np.dtype(np.uint8))
print(allocation.handle.hex(), allocation.device_uuid, allocation.event_handle.hex(), flush=True)
for line in sys.stdin:
    index, value = map(int, line.split())
    cuda.synchronize_event(allocation.event)
    print(array[index], flush=True)
    array[index] = value
    print("written", flush=True)
allocation.free()
while cuda.retired.collect():
    pass
print(driver.violations(), driver.live().allocations, driver.live().events, flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that allocates memory, tells its handle, and then takes lines: an index, and what to write there."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def mapping_from(process: subprocess.Popen[str], mappings: CudaMappings) -> CudaMapping:
    handle, uuid, event = line_of(process).split()
    device = device_with(mappings.runtime, uuid, FIELD)
    return mappings.map(bytes.fromhex(handle), SIZE, device, FIELD, None, bytes.fromhex(event))


def test_what_one_process_writes_the_other_reads_when_it_is_there(
    driver: FakeDriver, owner: subprocess.Popen[str], mappings: CudaMappings
) -> None:
    mapping = mapping_from(owner, mappings)
    array, peer = whole(driver, mapping), mappings.runtime
    stream = peer.create_stream(DEVICE)
    driver.launch(stream, lambda: np.put(array, 3, 77), 1)
    with peer.on(DEVICE):
        peer.record(mapping.event, stream)
    assert owner.stdin is not None
    print(3, 99, file=owner.stdin, flush=True)
    assert line_of(owner) == "77"
    assert line_of(owner) == "written"
    assert array[3] == 99
    mapping.close()
    peer.destroy_stream(stream, DEVICE)
    collect_all(peer)
    owner.stdin.close()
    assert line_of(owner) == "[] 0 0"


def test_memory_of_a_killed_process_is_refused(owner: subprocess.Popen[str], mappings: CudaMappings) -> None:
    mapping = mapping_from(owner, mappings)
    handle = mapping.handle
    mapping.close()
    collect_all(mappings.runtime)
    owner.kill()
    owner.wait()
    assert "or is dead" in reason_against(mappings, handle)


def test_memory_that_is_mapped_outlives_the_process_that_it_is_of(
    driver: FakeDriver, owner: subprocess.Popen[str], mappings: CudaMappings
) -> None:
    mapping = mapping_from(owner, mappings)
    owner.kill()
    owner.wait()
    assert whole(driver, mapping).size == SIZE
    mapping.close()
