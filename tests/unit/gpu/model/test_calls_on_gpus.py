"""Calls and batches whose tensors are on GPUs: what is the client's own memory, what is copied, what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import MachineError, ModelError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import BatchCall, Call, ShmSession
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import delivered, error_of, outputs_of
from tests.unit.gpu.fakes import DRIVER, MODEL, array_on, kernel, stream_on
from tests.unit.gpu.model.conftest import DEVICE, SLOTS, Calls, Client, session_on
from tests.unit.sessions import session_of, tensor

GIVEN = [1, 2, 3, 4]
FP32 = BY_NAME["FP32"]
SHARE = 4096
named_or_not = pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])


def test_an_input_on_a_gpu_is_there_already(calls: Calls) -> None:
    def infer(call: Call) -> None:
        x = call.input("X")
        assert isinstance(x, DeviceView)
        array = call.to_device(x)
        assert (array.address, array.device) == (call._memories[1 + DEVICE].address, DEVICE)
        assert array.is_read_only

    calls.serve(infer)


def test_a_tensor_that_is_delivered_on_a_gpu_is_a_view_there_and_the_gpu_is_waited_for(calls: Calls) -> None:
    request, done = delivered({}, ["Y"]), list[float]()
    request._inputs.append(Tensor.from_dlpack("X", array_on(calls.cuda, GIVEN).__dlpack__(stream=-1)))

    def infer(call: Call) -> None:
        x = call.input("X")
        assert (type(x), x.path) == (DeviceView, "triton")
        kernel(calls.stream, done.extend, x.array)
        call.put("Y", np.zeros(4, np.float32))

    assert error_of(calls.session, request, infer) == ""
    assert done == GIVEN


def test_strings_that_the_client_wants_on_a_gpu_are_in_the_response(calls: Calls) -> None:
    response = calls.serve(lambda call: call.put("WORDS", [b"ab", b"cde"]), {"WORDS": DEVICE}, room=64)
    assert calls.client.places(0)["WORDS"].is_in_response
    assert bytes(outputs_of(response)["WORDS"]) == b"\2\0\0\0ab\3\0\0\0cde"


@pytest.mark.parametrize("by_events", [False, True], ids=["", "by events"])
def test_a_model_may_go_on_without_a_gpu(client: Client, monkeypatch: pytest.MonkeyPatch, by_events: bool) -> None:
    def no_bindings() -> CudaRuntime:
        raise MachineError("cuda-bindings are not installed")

    x = np.array(GIVEN, np.float32)

    def infer(call: Call) -> None:
        for use in (
            lambda: call.ready_on(0),
            lambda: call.to_device(call.input("X")),
            lambda: call.device_output("Y", (4,), np.float32),
        ):
            with pytest.raises(MachineError, match="cuda-bindings are not installed"):
                use()
        call.put("Y", call.input("X").numpy() * 2)

    session = session_on(no_bindings, monkeypatch, gpu_events=by_events)
    assert error_of(session, client.host.request({"X": x}, {"Y": 16}), infer) == ""
    assert client.host.output("Y").tolist() == (x * 2).tolist()
    session.close()


@pytest.mark.parametrize("value", [np.ones(4, np.float32), None])
def test_what_is_no_view_is_not_copied(calls: Calls, value: Any) -> None:
    expected = "is no view of a call's tensor; expected what call.input or call.output"
    with calls.session.open(calls.client.host.request({}, {})) as call:
        for copied in (call.to_device, call.to_host):
            with pytest.raises(ModelError, match=expected):
                copied(value)


@pytest.mark.parametrize("serve", [ShmSession.serve, ShmSession.serve_streams])
def test_the_next_call_has_the_streams_of_one_that_is_over(calls: Calls, serve: Callable[..., Any]) -> None:
    def infer(call: Call) -> None:
        call.to_device(call.input("X"))

    counts = []
    for _ in range(3):
        serve(calls.session, [calls.client.host.request({"X": np.ones(4, np.float32)}, {})], infer)
        counts.append(DRIVER.live(MODEL).streams)
    assert counts[0] == counts[-1] > 1


def test_another_model_is_called_when_the_gpu_is_done(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def begin(*_: object) -> None:
        assert done == ["what was launched"]
        raise ModelError("there is none")

    monkeypatch.setattr(calls.session._open_context().forwarder, "begin", begin)

    def infer(call: Call) -> None:
        kernel(calls.stream, lambda _: done.append("what was launched"), call.input("X").array)
        call.forward("other", {"X": call.input("X")})

    assert calls.refusal(infer) == "shm:model: there is none"


@pytest.fixture(params=[{}, {"SHM_GPU_EVENTS": "true"}, {"SHM_DEBUG": "true"}], ids=["", "events", "debug"])
def batching(
    request: pytest.FixtureRequest, cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Calls]:
    access = CudaAccess(lambda: cuda)
    inputs, outputs = [tensor("X", dims=[4]), tensor("SHM", "UINT8")], [tensor("Y", dims=[4])]
    with (
        session_of(monkeypatch, inputs, outputs, cuda=access, parameters=request.param, max_batch_size=8) as session,
        stream_on(cuda) as stream,
    ):
        yield Calls(cuda, client, session, stream)


def serve_rows(batching: Calls, infer: Callable[[BatchCall], None]) -> list[list[float]]:
    """Serve a row in each slot, none of which lies beside that of the next; return the outputs."""
    client = batching.client

    def row(slot: int) -> InferenceRequest:
        claims = tuple(claim_of_allocation(each) for each in client.allocations)
        begin = slot * SHARE
        said = Table(
            {"X": InputSpan(FP32, (1, 4), 1, begin, 16)}, {"Y": OutputSpan(1 + DEVICE, begin + 512, 16)}, claims
        )
        return delivered(client.host.begin(said, slot), ["Y"], {"SHM": np.empty((1, 0), np.uint8)})

    responses = batching.session.serve_batch([row(slot) for slot in range(SLOTS)], infer)
    assert [response.error() for response in responses] == [None] * SLOTS
    for slot in range(SLOTS):
        client.wait_for_events(slot)
    return [client.output(slot) for slot in range(SLOTS)]


@named_or_not
def test_a_batch_stays_on_its_gpu(batching: Calls, monkeypatch: pytest.MonkeyPatch, is_named: bool) -> None:
    copied: list[Any] = []
    copy = CudaRuntime.copy

    def look(runtime: CudaRuntime, target: int, source: int, byte_size: int, on: int) -> None:
        with runtime.on(0):
            copied.append((runtime.pointer(target).kind, runtime.pointer(source).kind, byte_size))
        copy(runtime, target, source, byte_size, on)

    def infer(batch: BatchCall) -> None:
        if is_named:
            batch.ready_on(batching.stream)
        x, y = batch.input("X"), batch.output("Y", (4,), np.float32)
        assert isinstance(x.array, DeviceArray)
        assert isinstance(y.array, DeviceArray)
        assert (x.shape, y.shape) == ((SLOTS, 4), (SLOTS, 4))
        kernel(batching.stream, lambda x, y: np.multiply(x, 2, out=y), x.array, y.array, late_s=0.02)

    monkeypatch.setattr(CudaRuntime, "copy", look)
    for slot in range(SLOTS):
        batching.client.write(slot, slot + 1)
    assert serve_rows(batching, infer) == [[2 * slot + 2] * 4 for slot in range(SLOTS)]
    assert copied == [("device", "device", 16)] * (2 * SLOTS)


def test_an_array_of_all_rows_is_given_row_by_row(batching: Calls) -> None:
    rows = np.arange(SLOTS, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    found = serve_rows(batching, lambda batch: batch.put("Y", DRIVER.tensor(rows, stream=batching.stream)))
    assert found == rows.tolist()
