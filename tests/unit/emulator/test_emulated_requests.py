"""What the emulator tells that no real stub can, what it hands to its host, and a session of this library in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.gpu.arrays.capsules import CapsuleTensor, capsule_over, taken_over
from shm_backend_utils.tensors.dlpack import CUDA
from shm_backend_utils.testing.emulator import (
    Delivery,
    MetricsRegistry,
    TritonModelException,
    backend_module,
    deliver,
    deliver_response,
    sent_inputs,
    sent_outputs,
)
from shm_backend_utils.testing.emulator.pybind import StubDiesError


class Host:
    """A server that has one model, which answers with its inputs; it notes what it is asked."""

    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.executing = True
        self.asked: list[Any] = []
        self.backend: ModuleType = backend_module(self)

    def is_executing(self) -> bool:
        return self.executing

    def infer(self, request: Any) -> Any:
        return deliver_response(self.backend, sent_inputs(request))

    def stream(self, request: Any) -> Iterator[tuple[Any, bool]]:
        self.asked.append("begun")
        yield self.infer(request), False
        self.asked.append("went on")
        yield deliver_response(self.backend, []), True

    def cancel(self, request: Any) -> None:
        self.asked.append("cancelled")

    def model_dir(self) -> str:
        return "/models/m/1"

    def instance_name(self) -> str:
        return "m_0_0"

    def log(self, level: str, message: str) -> None:
        self.asked.append((level, message))

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        self.asked.append((name, config, files))

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        self.asked.append((name, with_dependents))

    def is_model_ready(self, name: str, version: str) -> bool:
        raise TritonModelException("not today")


@pytest.fixture
def host() -> Host:
    return Host()


class Sink:
    def __init__(self) -> None:
        self.taken: list[tuple[Any, bool]] = []

    def send(self, response: Any, *, is_final: bool) -> None:
        self.taken.append((response, is_final))


def delivered(host: Host, sink: Sink, parameters: Mapping[str, Any] | None = None) -> Any:
    return deliver(
        host.backend,
        Delivery([], ["Y"], parameters or {}),
        model_name="m",
        model_version=1,
        is_decoupled=True,
        sink=sink,
        is_cancelled=lambda: True,
    )


def call(host: Host, **more: Any) -> Any:
    inputs = [host.backend.Tensor("X", np.arange(3))]
    return host.backend.InferenceRequest(model_name="n", inputs=inputs, requested_output_names=[], **more)


def test_parameters_come_in_another_order_than_they_were_given(host: Host) -> None:
    assert delivered(host, Sink(), parameters={"a": 1, "b": "ü", "c": 0.5}).parameters() == '{"c":0.5,"b":"ü","a":1}'


def test_what_a_sender_sends_is_pruned_and_copied(host: Host) -> None:
    sink, y = Sink(), np.arange(2)
    sender = delivered(host, sink).get_response_sender()
    tensors = [host.backend.Tensor("Y", y), host.backend.Tensor("OTHER", y)]
    sender.send(host.backend.InferenceResponse(tensors))
    y[:] = 9
    sender.send(flags=1)
    (response, is_final), end = sink.taken
    (sent,) = sent_outputs(response)
    assert (sent.name, sent.datatype, sent.shape, is_final) == ("Y", "INT64", (2,), False)
    assert sent.array is not None
    assert sent.array.tolist() == [0, 1]
    assert end == (None, True)


def test_other_models_are_called_in_execute_alone(host: Host) -> None:
    host.executing = False
    with pytest.raises(TritonModelException, match=r"^BLS is only supported during the 'execute' function\.$"):
        call(host).exec()


def test_a_stream_is_read_as_far_as_it_is_asked_for_and_cancelled(host: Host) -> None:
    responses = call(host).exec(decoupled=True)
    assert host.asked == ["begun"]
    assert len(next(responses).output_tensors()) == 1
    responses.cancel()
    assert host.asked == ["begun", "cancelled"]
    assert next(responses).output_tensors() == []
    responses.cancel()  # of what has ended, nothing
    assert host.asked == ["begun", "cancelled", "went on"]
    assert len(list(responses)) == 2


def test_models_are_loaded_and_unloaded_by_the_host(host: Host) -> None:
    host.backend.load_model("m", config="{}", files={"file:1/model.py": b"x"})
    host.backend.unload_model("m", unload_dependents=True)
    assert host.asked == [("m", "{}", {"file:1/model.py": b"x"}), ("m", True)]
    assert host.backend.get_model_dir() == "/models/m/1"


def test_what_kills_a_real_stub_is_told(host: Host) -> None:
    made = call(host)
    for deadly in (made.is_cancelled, made.get_response_sender().is_cancelled, lambda: made.set_release_flags(1)):
        with pytest.raises(StubDiesError, match="no client has sent"):
            deadly()
    capsule = host.backend.Tensor("Y", np.zeros(1)).to_dlpack()
    host.backend.Tensor.from_dlpack("Y", capsule)
    with pytest.raises(StubDiesError, match="used_dlpack.*memory that is gone"):
        host.backend.Tensor.from_dlpack("Y", capsule)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.0.0", reason="NumPy 2's destructors end")
def test_an_array_of_numpy_1_by_dlpack_is_told(host: Host) -> None:
    with pytest.raises(StubDiesError, match="make the Tensor of the array itself"):
        host.backend.Tensor.from_dlpack("Y", np.zeros(1))


def test_memory_of_a_gpu_is_handed_on_where_it_is_and_kept(host: Host) -> None:
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    given = CapsuleTensor(4096, (2, 3), (12, 4), np.dtype(np.float32), CUDA, 1, False)
    tensor = host.backend.Tensor.from_dlpack("X", capsule_over(given, owner, None))
    del owner
    assert (tensor.is_cpu(), tensor.shape(), tensor.__dlpack_device__()) == (False, [2, 3], (CUDA, 1))
    taken = taken_over(tensor.to_dlpack())
    assert taken.memory == given
    (sent,) = sent_outputs(host.backend.InferenceResponse([tensor]))
    assert (sent.datatype, sent.shape, sent.array) == ("FP32", (2, 3), None)
    del tensor, sent
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None
