"""Calls that a GPU is waited for are counted when they end, and as what they end."""

from __future__ import annotations

from typing import Any

import pytest
from shm_backend_utils.model.completion import Completion
from shm_backend_utils.model.instance import Instance
from shm_backend_utils.model.measured_call import MeasuredCall
from shm_backend_utils.model.plans import OrdinaryRequest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.model_spec import ModelSpec

SPEC = ModelSpec.from_config({"name": "m"})


class Metrics:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def answered(self, path: str, zero_copy_bytes: int, copied_bytes: int) -> None:
        self.told.append((path, zero_copy_bytes, copied_bytes))

    def refused(self, error: BaseException) -> None:
        self.told.append(type(error))

    def took(self, own_s: float) -> None:
        assert own_s > 0


class Machine:
    """The server, a request without tensors, and a GPU; each does as much as a call needs."""

    device = 0

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def parameters(self, request: Any) -> str:
        return ""

    def begin(self, text: str) -> tuple[OrdinaryRequest, int]:
        return OrdinaryRequest({}), 0

    def requested_output_names(self) -> list[str]:
        return []

    def inputs(self) -> list[Any]:
        return []

    def response(self, tensors: list[Any]) -> str:
        return "an answer"

    def error_response(self, error: Exception) -> str:
        return "an error"

    def stream(self) -> str:
        return "the GPU's"

    def synchronize(self, devices: list[int]) -> None:
        if devices and self._failure is not None:
            raise self._failure


def measured(machine: Any, completion: Completion | None) -> tuple[MeasuredCall, list[Any]]:
    metrics: Any = Metrics()
    instance = Instance(SPEC, machine, machine, machine, machine)
    return MeasuredCall(metrics, instance, machine, completion), metrics.told


def test_a_call_that_a_gpu_works_for_is_counted_when_it_has_ended() -> None:
    machine: Any = Machine()
    completion = Completion(machine)
    call, told = measured(machine, completion)
    with call:
        assert call.stream == "the GPU's"
    assert told == []
    completion.finish()
    assert told == [("triton", 0, 0)]


def test_a_call_whose_gpu_fails_is_a_refusal() -> None:
    machine: Any = Machine(MachineError("the GPU is gone"))
    completion = Completion(machine)
    call, told = measured(machine, completion)
    with call:
        assert call.stream == "the GPU's"
    completion.finish()
    assert told == [MachineError]


def test_a_call_whose_gpu_fails_at_its_end_is_a_refusal() -> None:
    machine: Any = Machine(MachineError("the GPU is gone"))
    call, told = measured(machine, None)
    with pytest.raises(MachineError), call:
        assert call.stream == "the GPU's"
    assert told == [MachineError]


def test_a_call_without_a_gpu_is_counted_at_once() -> None:
    machine: Any = Machine()
    call, told = measured(machine, Completion(machine))
    with call:
        pass
    assert told == [("triton", 0, 0)]
