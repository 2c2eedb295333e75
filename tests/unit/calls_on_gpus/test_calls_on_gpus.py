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
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.calls_on_gpus.device_calls import DEVICE, HOST, SLOTS, Client, session_on
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import answers_to, delivered, message_of, outputs_of
from tests.unit.fake_gpu import DRIVER, MODEL, array_on, kernel, stream_on
from tests.unit.sessions import session_of, tensor

GIVEN = [1, 2, 3, 4]


def address_in(call: Call, offset: int) -> int:
    """Return where an offset of the client's memory on the instance's GPU is in the model's process."""
    return call._memories[1 + DEVICE].address + offset


def test_an_input_on_a_gpu_is_there_already(client: Client, session: ShmSession) -> None:
    def infer(call: Call) -> None:
        x = call.input("X")
        assert isinstance(x, DeviceView)
        array = call.to_device(x)
        assert (array.address, array.device) == (address_in(call, 0), DEVICE)
        assert array.is_read_only

    (response,) = session.serve([client.request(0, {})], infer)
    assert response.error() is None


def test_a_tensor_that_is_delivered_on_a_gpu_is_a_view_there_and_the_gpu_is_waited_for(
    cuda: CudaRuntime, session: ShmSession, stream: int
) -> None:
    request, done = delivered({}, ["Y"]), []  # type: ignore[var-annotated]
    request._inputs.append(Tensor.from_dlpack("X", array_on(cuda, GIVEN).__dlpack__(stream=-1)))

    def infer(call: Call) -> None:
        x = call.input("X")
        assert (type(x), x.path) == (DeviceView, "triton")
        kernel(stream, done.extend, x.array)
        call.put("Y", np.zeros(4, np.float32))

    (response,) = session.serve([request], infer)
    assert response.error() is None
    assert done == GIVEN


@pytest.mark.parametrize("wanted", [DEVICE, HOST], ids=["on a GPU", "on the host"])
@pytest.mark.parametrize("kind", ["host", "device", "managed"])
def test_an_array_goes_to_where_the_client_wants_it(
    client: Client, session: ShmSession, stream: int, kind: Any, wanted: int
) -> None:
    def infer(call: Call) -> None:
        values = np.array(GIVEN, np.float32)
        call.put("Y", values if kind == "host" else DRIVER.tensor(values, kind=kind, stream=stream))

    (response,) = session.serve([client.request(0, {"Y": wanted})], infer)
    assert response.error() is None
    assert client.output(0, "Y") == GIVEN


def test_strings_that_the_client_wants_on_a_gpu_are_in_the_response(client: Client, session: ShmSession) -> None:
    (response,) = session.serve(
        [client.request(0, {"WORDS": DEVICE}, room=64)], lambda call: call.put("WORDS", [b"ab", b"cde"])
    )
    assert response.error() is None
    assert client.places(0)["WORDS"].is_in_response
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
    (response,) = session.serve([client.host.request({"X": x}, {"Y": 16})], infer)
    assert response.error() is None
    assert client.host.output("Y").tolist() == (x * 2).tolist()
    session.close()


@pytest.mark.parametrize("value", [np.ones(4, np.float32), None])
def test_what_is_no_view_is_not_copied(client: Client, session: ShmSession, value: Any) -> None:
    with session.open(client.host.request({}, {})) as call:
        for copied in (call.to_device, call.to_host):
            with pytest.raises(
                ModelError, match="is no view of a call's tensor; expected what call.input or call.output"
            ):
                copied(value)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_a_response_of_a_stream_leaves_when_the_gpu_is_done(
    client: Client, session: ShmSession, stream: int, is_named: bool
) -> None:
    done: list[int] = []

    def answer(call: StreamCall) -> Iterator[None]:
        if is_named:
            call.ready_on(stream)
        for number in range(2):
            kernel(stream, lambda _: done.append(number), call.input("X").array)  # noqa: B023  # it runs before the next
            yield
            assert done == list(range(number + 1))

    request = client.request(0, {})
    session.serve_streams([request], answer)
    assert [each and each.error() for each in answers_to(request).sent] == [None] * 3


@pytest.mark.parametrize("serve", [ShmSession.serve, ShmSession.serve_streams])
def test_the_next_call_has_the_streams_of_one_that_is_over(
    client: Client, session: ShmSession, serve: Callable[..., Any]
) -> None:
    def infer(call: Call) -> None:
        call.to_device(call.input("X"))

    counts = []
    for _ in range(3):
        serve(session, [client.host.request({"X": np.ones(4, np.float32)}, {})], infer)
        counts.append(DRIVER.live(MODEL).streams)
    assert counts[0] == counts[-1] > 0


def test_another_model_is_called_when_the_gpu_is_done(
    client: Client, session: ShmSession, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def begin(*_: object) -> None:
        assert done == ["what was launched"]
        raise ModelError("there is none")

    monkeypatch.setattr(session._open_context().forwarder, "begin", begin)

    def infer(call: Call) -> None:
        kernel(stream, lambda _: done.append("what was launched"), call.input("X").array)
        call.forward("other", {"X": call.input("X")})

    (response,) = session.serve([client.request(0, {})], infer)
    assert message_of(response) == "shm:model: there is none"


FP32 = BY_NAME["FP32"]
SHARE = 4096


@pytest.fixture(params=[{}, {"SHM_GPU_EVENTS": "true"}, {"SHM_DEBUG": "true"}], ids=["", "events", "debug"])
def batching(
    request: pytest.FixtureRequest, cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ShmSession]:
    access = CudaAccess(lambda: cuda)
    inputs, outputs = [tensor("X", dims=[4]), tensor("SHM", "UINT8")], [tensor("Y", dims=[4])]
    with session_of(monkeypatch, inputs, outputs, cuda=access, parameters=request.param, max_batch_size=8) as batching:
        yield batching


def row_of(client: Client, slot: int, output_device: int) -> InferenceRequest:
    """Return a request of one row, which does not lie beside that of the next slot."""
    claims = tuple(claim_of_allocation(each) for each in client.allocations)
    begin = slot * SHARE
    said = Table(
        {"X": InputSpan(FP32, (1, 4), 1, begin, 16)}, {"Y": OutputSpan(1 + output_device, begin + 512, 16)}, claims
    )
    return delivered(client.host.begin(said, slot), ["Y"], {"SHM": np.empty((1, 0), np.uint8)})


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_a_batch_stays_on_the_gpu_that_its_rows_are_on(
    client: Client, batching: ShmSession, stream: int, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    copied: list[Any] = []
    copy = CudaRuntime.copy

    def look(runtime: CudaRuntime, target: int, source: int, byte_size: int, on: int) -> None:
        with runtime.on(0):
            copied.append((runtime.pointer(target).kind, runtime.pointer(source).kind, byte_size))
        copy(runtime, target, source, byte_size, on)

    def infer(batch: BatchCall) -> None:
        if is_named:
            batch.ready_on(stream)
        x, y = batch.input("X"), batch.output("Y", (4,), np.float32)
        assert isinstance(x.array, DeviceArray)
        assert isinstance(y.array, DeviceArray)
        assert (x.shape, y.shape) == ((SLOTS, 4), (SLOTS, 4))
        kernel(stream, lambda x, y: np.multiply(x, 2, out=y), x.array, y.array, late_s=0.02)

    monkeypatch.setattr(CudaRuntime, "copy", look)
    for slot in range(SLOTS):
        client.write(slot, slot + 1)
    responses = batching.serve_batch([row_of(client, slot, 0) for slot in range(SLOTS)], infer)
    assert [response.error() for response in responses] == [None] * SLOTS
    for slot in range(SLOTS):
        client.wait_for_events(slot)
    assert [client.output(slot, "Y") for slot in range(SLOTS)] == [[2 * slot + 2] * 4 for slot in range(SLOTS)]
    assert copied == [("device", "device", 16)] * (2 * SLOTS)


def test_an_array_of_all_rows_is_given_row_by_row(cuda: CudaRuntime, client: Client, batching: ShmSession) -> None:
    with stream_on(cuda) as stream:

        def infer(batch: BatchCall) -> None:
            rows = np.arange(SLOTS, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
            batch.put("Y", DRIVER.tensor(rows, stream=stream))

        responses = batching.serve_batch([row_of(client, slot, 0) for slot in range(SLOTS)], infer)
        assert [response.error() for response in responses] == [None] * SLOTS
        assert [client.output(slot, "Y") for slot in range(SLOTS)] == [[slot] * 4 for slot in range(SLOTS)]
