"""Machines without NVIDIA's bindings, without GPUs, or whose CUDA does not work."""

from __future__ import annotations

import sys

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.claims_of import claim_of_allocation
from tests.unit.fake_gpu import BLOCK, DRIVER, MODEL
from tests.unit.manager_cuda.device_claims import Model, refusal, register

WITHOUT_BINDINGS = "GPU memory needs NVIDIA's cuda-bindings, which cannot be imported"


def no_bindings() -> CudaRuntime:
    raise MachineError(WITHOUT_BINDINGS)


def test_without_the_bindings_the_machine_is_at_fault_and_the_error_says_what_to_install(
    region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(no_bindings, region)
    manager = SharedMemoryManager(cuda=CudaAccess(no_bindings))
    for work in (
        lambda: register(manager, allocation),
        lambda: model.resolve(claim_of_allocation(allocation)),
        lambda: model.resolve(claim_of_allocation(allocation, fence=None)),
    ):
        error = refusal(work, allocation.handle, region.header.token)
        assert (type(error), str(error)) == (MachineError, WITHOUT_BINDINGS)
        assert not has_users(region.segment.fileno())
    model.resolver.close()


def test_a_manager_that_is_told_of_no_cuda_asks_for_the_bindings_itself(
    allocation: CudaAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.delattr("cuda.bindings.driver")
    manager = SharedMemoryManager()
    with pytest.raises(MachineError, match=WITHOUT_BINDINGS):
        register(manager, allocation)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "the kernel's NVIDIA driver and its library are of different versions"),
        ("CUDA_ERROR_NO_DEVICE", "no GPU is visible here; see nvidia-smi"),
        ("CUDA_ERROR_NOT_SUPPORTED", "have no CUDA IPC"),
    ],
)
def test_a_machine_whose_cuda_does_not_work_says_so_and_may_be_tried_again(
    model: Model, region: ManagedRegion, allocation: CudaAllocation, name: str, remedy: str
) -> None:
    claim = claim_of_allocation(allocation)
    for function in ("cuDeviceGetCount", "cuIpcOpenMemHandle"):
        DRIVER.fail_next(function, name, process=MODEL)
        error = refusal(lambda: model.resolve(claim), allocation.handle, region.header.token)
        assert name in str(error)
        assert remedy in str(error)
        assert not has_users(region.segment.fileno())
    assert model.resolve(claim).memory.byte_size == BLOCK
