"""GPUs by their UUIDs, the current one, and the loading of CUDA."""

from __future__ import annotations

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAccess, device_of
from shm_backend_utils.memory.cuda.runtime import CudaRuntime, device_guard
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.cuda_memory.device_memory import FIELD
from tests.unit.fake_gpu import fails_by, in_another_thread


def test_a_device_is_found_by_its_uuid_whatever_its_number(cuda: FakeCuda) -> None:
    peer = FakeCuda(uuids=[cuda.device_uuid(1), cuda.device_uuid(0)])
    assert [device_of(peer, cuda.device_uuid(device), FIELD) for device in (0, 1)] == [1, 0]


@pytest.mark.parametrize("devices", [0, 1])
def test_a_device_that_is_not_seen_is_refused_and_the_message_says_how_many_are(cuda: FakeCuda, devices: int) -> None:
    with pytest.raises(RegionRefusedError) as caught:
        device_of(FakeCuda(devices), cuda.device_uuid(1), FIELD)
    assert caught.value.field == FIELD
    assert f"it sees {devices}" in caught.value.reason
    assert "see CUDA_VISIBLE_DEVICES, --gpus and the model's instance_group" in caught.value.reason


def test_a_guard_makes_a_device_current_for_its_block(cuda: FakeCuda) -> None:
    with device_guard(cuda, 1):
        assert cuda.current_device() == 1
        with device_guard(cuda, 0):
            assert cuda.current_device() == 0
        assert cuda.current_device() == 1
        assert in_another_thread(cuda.current_device) == 0
    assert cuda.current_device() == 0


def test_a_guard_restores_the_device_after_an_error(cuda: FakeCuda) -> None:
    with pytest.raises(ZeroDivisionError), device_guard(cuda, 1):
        print(1 / 0)
    assert cuda.current_device() == 0


def test_a_guard_for_a_device_that_there_is_not_leaves_the_current_one(cuda: FakeCuda) -> None:
    entered: list[int] = []
    with fails_by("cudaErrorInvalidDevice"), device_guard(cuda, 2):
        entered.append(2)
    assert entered == []
    assert cuda.current_device() == 0


def test_a_guard_for_the_current_device_asks_nothing_of_cuda(cuda: FakeCuda) -> None:
    with device_guard(cuda, 0):
        pass
    assert cuda.log == []


# Loading


def test_cuda_is_loaded_when_it_is_needed_and_once() -> None:
    loaded: list[FakeCuda] = []

    def load() -> CudaRuntime:
        loaded.append(FakeCuda())
        return loaded[-1]

    access = CudaAccess(load)
    assert loaded == []
    mappings = access.mappings
    assert access.mappings is mappings
    assert [access.runtime, mappings.runtime] == [loaded[0], loaded[0]]
    assert len(loaded) == 1


def test_cuda_that_could_not_be_loaded_is_tried_again() -> None:
    outcomes: list[CudaRuntime | MachineError] = [MachineError("there is no GPU yet"), FakeCuda()]

    def load() -> CudaRuntime:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MachineError):
            raise outcome
        return outcome

    access = CudaAccess(load)
    with pytest.raises(MachineError, match="there is no GPU yet"):
        access.runtime  # noqa: B018
    assert isinstance(access.runtime, FakeCuda)
