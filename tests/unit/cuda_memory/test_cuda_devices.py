"""GPUs by their UUIDs, and the loading of CUDA."""

from __future__ import annotations

import types
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.mappings import device_with
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from tests.unit.cuda_memory.device_memory import FIELD


def seeing(uuids: list[str]) -> Any:
    """Return a runtime that sees these GPUs in this order."""
    return types.SimpleNamespace(device_count=lambda: len(uuids), device_uuid=uuids.__getitem__)


def test_a_device_is_found_by_its_uuid_whatever_its_number(gpu: CudaRuntime) -> None:
    other_way = seeing([gpu.device_uuid(1), gpu.device_uuid(0)])
    assert [device_with(other_way, gpu.device_uuid(device), FIELD) for device in (0, 1)] == [1, 0]
    assert [device_with(gpu, gpu.device_uuid(device), FIELD) for device in (0, 1)] == [0, 1]


@pytest.mark.parametrize("devices", [0, 1])
def test_a_device_that_is_not_seen_is_refused_and_the_message_says_how_many_are(gpu: CudaRuntime, devices: int) -> None:
    with pytest.raises(RegionRefusedError) as caught:
        device_with(seeing([gpu.device_uuid(0)][:devices]), gpu.device_uuid(1), FIELD)
    assert caught.value.field == FIELD
    assert f"it sees {devices}" in caught.value.reason
    assert "(MIG)" in caught.value.reason
    assert "see CUDA_VISIBLE_DEVICES, --gpus and the model's instance_group" in caught.value.reason


def test_cuda_is_loaded_when_it_is_needed_and_once(gpu: CudaRuntime) -> None:
    loaded: list[CudaRuntime] = []

    def load() -> CudaRuntime:
        loaded.append(gpu)
        return gpu

    access = CudaAccess(load)
    assert (access.collect(), access.has_retired, loaded) == (False, False, [])
    mappings = access.mappings
    assert access.mappings is mappings
    assert [access.runtime, mappings.runtime] == [gpu, gpu]
    assert len(loaded) == 1


def test_cuda_that_could_not_be_loaded_is_tried_again(gpu: CudaRuntime) -> None:
    outcomes: list[CudaRuntime | MachineError] = [MachineError("there is no GPU yet"), gpu]

    def load() -> CudaRuntime:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MachineError):
            raise outcome
        return outcome

    access = CudaAccess(load)
    with pytest.raises(MachineError, match="there is no GPU yet"):
        access.runtime  # noqa: B018
    assert access.runtime is gpu
