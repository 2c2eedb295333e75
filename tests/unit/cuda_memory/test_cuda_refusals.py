"""Device memory that is not mapped: what is no handle, freed, on another GPU, or smaller than claimed."""

from __future__ import annotations

import gc

import pytest

from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMappings
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, NOTHING, mapping_of, reason_against, whole
from tests.unit.fake_gpu import SIZE


@pytest.mark.parametrize("length", [0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1])
def test_a_handle_of_another_length_is_refused(mappings: CudaMappings, peer: FakeCuda, length: int) -> None:
    assert reason_against(mappings, b"\1" * length) == f"its handle has {length} bytes; expected {HANDLE_LENGTH}"
    assert peer.log == []


def test_less_than_was_allocated_may_be_claimed(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mappings.map(allocation.handle, SIZE - 1, DEVICE, FIELD)
    assert mapping.byte_size == SIZE  # another claim may be of more


def test_more_than_was_allocated_is_refused_and_nothing_stays_open(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    reason = reason_against(mappings, allocation.handle, SIZE + 1)
    assert reason == f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"
    assert peer.live == NOTHING


def test_what_lies_before_the_memory_in_its_allocation_does_not_count(allocation: CudaAllocation) -> None:
    class InnerCuda(FakeCuda):
        """Opens memory that begins inside of a larger block."""

        def extent(self, address: int) -> tuple[int, int]:
            begin, byte_size = super().extent(address)
            return begin - 512, byte_size + 512

    inner = InnerCuda()
    mappings = CudaMappings(inner)
    mapping_of(allocation, mappings).close()
    assert reason_against(mappings, allocation.handle, SIZE + 1).endswith(f"an allocation of {SIZE}")
    assert inner.live == NOTHING


def test_freed_memory_is_refused(cuda: FakeCuda, mappings: CudaMappings) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    reason = reason_against(mappings, allocation.handle)
    assert "cudaErrorInvalidResourceHandle" in reason
    assert "its owner has freed the memory" in reason
    assert "--ipc=host --pid=host" in reason


def test_memory_of_the_same_process_is_refused(allocation: CudaAllocation, cuda: FakeCuda) -> None:
    reason = reason_against(CudaMappings(cuda), allocation.handle)
    assert "cudaErrorDeviceUninitialized" in reason
    assert "exported by this very process, which has the memory already" in reason


def test_memory_on_another_device_is_refused(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    reason = reason_against(mappings, allocation.handle, device=0)
    assert "cudaErrorMapBufferObjectFailed" in reason
    assert "on a GPU that this process cannot reach" in reason


def test_memory_on_a_device_that_there_is_not_is_refused(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    reason = reason_against(mappings, allocation.handle, device=2)
    assert "cudaErrorInvalidDevice" in reason
    assert "see CUDA_VISIBLE_DEVICES and --gpus" in reason


def test_what_is_no_handle_is_refused(mappings: CudaMappings) -> None:
    reason = reason_against(mappings, bytes(HANDLE_LENGTH))
    assert "cudaErrorInvalidValue" in reason
    assert "the handle is none of this machine's GPUs" in reason


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("cudaErrorNotSupported", "use CPU regions"),
        ("cudaErrorPeerAccessUnsupported", "give model and client the same GPU"),
        ("cudaErrorNoDevice", "see nvidia-smi"),
    ],
)
def test_what_cuda_refuses_is_told_with_a_remedy(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, name: str, remedy: str
) -> None:
    peer.fail_next("open", name)
    reason = reason_against(mappings, allocation.handle)
    assert name in reason
    assert remedy in reason


@pytest.mark.parametrize("method", ["current_device", "set_device", "open", "extent"])
def test_what_was_refused_leaves_nothing_open_and_may_be_tried_again(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, method: str
) -> None:
    peer.fail_next(method, "cudaErrorUnknown")
    assert "cudaErrorUnknown: see CUDA's documentation" in reason_against(mappings, allocation.handle)
    gc.collect()
    assert peer.live == NOTHING
    assert whole(mapping_of(allocation, mappings)).get().size == SIZE
