"""Machines without CuPy, without GPUs, or whose CUDA does not work."""

from __future__ import annotations

import sys

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import SharedMemoryManager
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.claims_of import claim_of_allocation
from tests.unit.fake_gpu import SIZE
from tests.unit.manager_cuda.device_claims import Model, refusal, register

WITHOUT_CUPY = "GPU memory needs CuPy, which is not installed; install triton-shm-backend-utils[cuda]"


def no_cupy() -> FakeCuda:
    raise MachineError(WITHOUT_CUPY)


def test_without_cupy_the_machine_is_at_fault_and_the_error_says_what_to_install(
    region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(no_cupy, region)
    manager = SharedMemoryManager(cuda=CudaAccess(no_cupy))
    for work in (
        lambda: register(manager, allocation),
        lambda: model.resolve(claim_of_allocation(allocation)),
        lambda: model.resolve(claim_of_allocation(allocation, fence=None)),
    ):
        error = refusal(work, allocation.handle, region.header.token)
        assert (type(error), str(error)) == (MachineError, WITHOUT_CUPY)
        assert not has_users(region.segment.fileno())
    model.resolver.close()


def test_a_manager_that_is_told_of_no_cuda_asks_for_cupy_itself(
    allocation: CudaAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    manager = SharedMemoryManager()
    with pytest.raises(MachineError, match="CuPy, which is not installed"):
        register(manager, allocation)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("cudaErrorInsufficientDriver", "the NVIDIA driver is missing, or older than CuPy's CUDA; update it"),
        ("cudaErrorNoDevice", "no GPU is visible here; see nvidia-smi"),
        ("cudaErrorNotSupported", "this platform has no CUDA IPC"),
    ],
)
def test_a_machine_whose_cuda_does_not_work_says_so_and_may_be_tried_again(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation, name: str, remedy: str
) -> None:
    claim = claim_of_allocation(allocation)
    for method in ("device_count", "current_device"):
        cuda.fail_next(method, name)
        error = refusal(lambda: model.resolve(claim), allocation.handle, region.header.token)
        assert name in str(error)
        assert remedy in str(error)
        assert not has_users(region.segment.fileno())
    assert model.resolve(claim).memory.byte_size == SIZE


def test_a_machine_without_gpus_refuses_every_claim(region: ManagedRegion, allocation: CudaAllocation) -> None:
    cuda = FakeCuda(devices=0)
    model = Model(lambda: cuda, region)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation)))
    assert "it sees 0" in str(error)
    model.resolver.close()
