"""Device memory of another process, which may be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.memory import CudaMapping, CudaMappings, device_of
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, NOTHING, reason_against, whole
from tests.unit.fake_gpu import SIZE, objects_of

OWNER = f"""
import os, sys
import numpy as np
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

cuda = FakeCuda()
allocation = CudaAllocation(cuda, {SIZE}, {DEVICE})
array = allocation.array_at(0, np.dtype(np.uint8), ({SIZE},), {SIZE}, None)
print(allocation.handle.hex(), allocation.device_uuid, flush=True)
for line in sys.stdin:
    index, value = map(int, line.split())
    print(array.get()[index], flush=True)
    array[index] = value
    cuda.synchronize(cuda.current_stream().ptr)
    print("written", flush=True)
del array
allocation.free()
print(cuda.live, flush=True)
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
    handle, uuid = line_of(process).split()
    device = device_of(mappings.runtime, uuid, FIELD)
    return mappings.map(bytes.fromhex(handle), SIZE, device, FIELD)


def test_what_one_process_writes_the_other_reads(owner: subprocess.Popen[str], mappings: CudaMappings) -> None:
    array = whole(mapping_from(owner, mappings))
    array.peek()[3] = 77
    assert owner.stdin is not None
    print(3, 99, file=owner.stdin, flush=True)
    assert line_of(owner) == "77"
    assert line_of(owner) == "written"
    assert array.get()[3] == 99
    owner.stdin.close()
    assert line_of(owner) == str(NOTHING)


def test_memory_of_a_killed_process_is_refused(owner: subprocess.Popen[str], mappings: CudaMappings) -> None:
    mapping = mapping_from(owner, mappings)
    handle = mapping.handle
    mapping.close()
    owner.kill()
    owner.wait()
    assert "cudaErrorInvalidResourceHandle" in reason_against(mappings, handle)
    assert objects_of(owner.pid) == []
