"""Calls and batches on GPUs: what is copied and waited for; and the device memory that requests or models name."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import CallerError, MachineError, ModelError, RegionRefusedError, ShmError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import has_borrowers, has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import BatchCall, Call, ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.claims_of import Resolved, claim_of_allocation, resolved, slot_of
from tests.unit.emulated import delivered, error_of, outputs_of
from tests.unit.gpu.fakes import BLOCK, DRIVER, MODEL, SIZE, array_on, content, held_back, kernel, left_of, stream_on
from tests.unit.gpu.model.conftest import DEVICE, SLOTS, Calls, Client, session_on
from tests.unit.sessions import session_of, tensor

GIVEN = [1, 2, 3, 4]
FP32 = BY_NAME["FP32"]
SHARE = 4096
named_or_not = pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])


def test_an_input_on_a_gpu_is_there_already(calls: Calls) -> None:
    def infer(call: Call) -> None:
        array = call.to_device(call.input("X"))
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


@pytest.mark.parametrize("is_early", [False, True], ids=["", "early"])
def test_a_model_may_go_on_without_a_gpu(client: Client, monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
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

    session = session_on(no_bindings, monkeypatch, gpu_events=is_early)
    assert error_of(session, client.host.request({"X": x}, {"Y": 16}), infer) == ""
    assert client.host.output("Y").tolist() == (x * 2).tolist()
    session.close()


@pytest.mark.parametrize("value", [np.ones(4, np.float32), None])
def test_what_is_no_view_is_not_copied(calls: Calls, value: Any) -> None:
    expected = "is not a view of a call's tensor; expected a view from call.input or call.output"
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
        client.wait_for_gpus(slot)
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


@pytest.mark.parametrize("batching", [{"SHM_GPU_EVENTS": "true", "SHM_PIN_HOST_MEMORY": "true"}], indirect=True)
def test_a_gpu_has_read_gathered_rows_before_the_next_batch(batching: Calls) -> None:
    client, read = batching.client, list[float]()

    def row(slot: int) -> InferenceRequest:
        claims = tuple(claim_of_allocation(each, fence=0) for each in client.allocations)
        said = Table({}, {"Y": OutputSpan(1 + DEVICE, slot * SHARE, 16)}, claims)
        x = np.full((1, 4), slot, np.float32)
        return delivered(client.host.begin(said, slot), ["Y"], {"X": x, "SHM": np.empty((1, 0), np.uint8)})

    def infer(batch: BatchCall) -> None:
        batch.ready_on(batching.stream)
        x, y = batch.input("X").numpy(), batch.output("Y", (4,), np.float32)
        kernel(batching.stream, lambda _: read.extend(x[:, 0].tolist()), y.array)

    with held_back(batching.stream) as finish:
        threading.Timer(0.3, finish.set).start()
        for slots in ((0, 1), (2, 3)):
            batching.session.serve_batch([row(slot) for slot in slots], infer)
    for slot in range(SLOTS):
        client.wait_for_gpus(slot)
    assert read == [0, 1, 2, 3]


def test_an_array_of_all_rows_is_given_row_by_row(batching: Calls) -> None:
    rows = np.arange(SLOTS, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    found = serve_rows(batching, lambda batch: batch.put("Y", DRIVER.tensor(rows, stream=batching.stream)))
    assert found == rows.tolist()


OTHER_DEVICE = 1
FIELD = "regions[1]"


class Model:
    def __init__(self, cuda: Callable[[], CudaRuntime], region: ManagedRegion, **config: Any) -> None:
        self.resolver = Resolver(Config(**config), CudaAccess(cuda))
        self._region = region

    def resolve(self, claim: CudaRegionClaim) -> Resolved:
        return resolved(self.resolver, claim, slot_of(self.resolver, self._region))

    def close(self) -> None:
        self.resolver.close()


@pytest.fixture
def allocation(client_cuda: CudaRuntime) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client_cuda, SIZE, OTHER_DEVICE)
    yield allocation
    allocation.free()


@pytest.fixture
def model(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[Model]:
    with contextlib.closing(Model(lambda: cuda, region)) as model:
        yield model


def refusal(work: Callable[[], object], *secrets: bytes) -> ShmError:
    with pytest.raises((RegionRefusedError, MachineError)) as caught:
        work()
    error = caught.value
    for secret in secrets:
        for text in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
            assert text not in str(error)
    del caught  # it has the frames, and what they hold
    return error.with_traceback(None)


@pytest.mark.parametrize(("first", "second"), [(BLOCK, 100), (100, BLOCK)])
def test_claims_of_one_memory_may_differ(model: Model, allocation: CudaAllocation, first: int, second: int) -> None:
    for byte_size in (first, second):
        assert model.resolve(claim_of_allocation(allocation, byte_size=byte_size)).memory.byte_size == byte_size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": bytes(HANDLE_LENGTH)}, ["CUDA_ERROR_INVALID_VALUE", "it is of a GPU that is not in this machine"]),
        ({"byte_size": BLOCK + 1}, [f"it claims {BLOCK + 1} bytes of an allocation of {BLOCK}"]),
        ({"device_uuid": "0" * 32}, ["that this model does not see (it sees 2)", "--gpus", "instance_group"]),
    ],
    ids=["no handle", "more than was allocated", "a GPU not seen"],
)
@pytest.mark.parametrize("fence", [0, None], ids=["fenced", "unfenced"])
def test_memory_that_cannot_be_claimed_is_refused_and_the_client_may_free_it(
    cuda: CudaRuntime,
    model: Model,
    region: ManagedRegion,
    allocation: CudaAllocation,
    changes: dict[str, Any],
    words: list[str],
    fence: int | None,
) -> None:
    claim = claim_of_allocation(allocation, fence=fence, **changes)
    error = refusal(lambda: model.resolve(claim), claim.handle, allocation.handle, region.header.token)
    assert isinstance(error, RegionRefusedError)
    assert error.field == FIELD
    assert region.segment.key not in str(error)
    assert [word for word in words if word not in error.reason] == []
    cuda.retired.collect_now()
    assert not any(left_of(MODEL))
    assert not has_users(region.segment.fileno())


def test_unfenced_memory_may_be_refused(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> None:
    model = Model(lambda: cuda, region, foreign_regions=False)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation, fence=None)), allocation.handle)
    assert str(error) == f"{FIELD} refused: this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)"
    assert DRIVER.count("cuIpcOpenMemHandle", MODEL) == 0
    assert model.resolve(claim_of_allocation(allocation)).memory.byte_size == BLOCK
    model.close()


@pytest.mark.parametrize("changes", [{"is_for_one_request": True}, {"fence": None}], ids=["lent", "not fenced"])
def test_memory_for_one_request_that_is_too_much_is_unmapped_before_that_is_told(
    cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation, changes: dict[str, Any]
) -> None:
    model = Model(lambda: cuda, region, max_mapped_bytes=BLOCK - 1)
    slot = slot_of(model.resolver, region)
    said = Table({}, {}, (claim_of_allocation(allocation, **changes),))
    with pytest.raises(MachineError, match="SHM_MAX_MAPPED_BYTES") as caught:  # which keeps the frames
        model.resolver.open_further(said, slot)
    assert not any(left_of(MODEL))
    assert not has_borrowers(region.segment.fileno(), layout.record_offset(0, region.header.record_byte_size))
    del caught, slot
    model.close()


# Registered by hand


def test_registered_memory_is_the_clients(cuda: CudaRuntime, allocation: CudaAllocation) -> None:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    registered: tuple[Any, ...] = ("mine", allocation.handle, SIZE, OTHER_DEVICE)
    manager.register_cuda_shared_memory(*registered)
    here = DRIVER.memory(allocation.address, (SIZE,), np.uint8)
    here[:] = 0
    part = manager.get_memory_info("mine", 100, 10)
    content(part.memory)[:] = 42
    assert here[99:111].tolist() == [0, *[42] * 10, 0]
    assert part.attributes == BufferAttributes(MemoryType.GPU, OTHER_DEVICE, 10, allocation.handle)
    assert manager.status() == [RegionStatus("mine", "", 0, SIZE)]
    with pytest.raises(CallerError, match=f"of region 'mine' were asked for; expected 0 to {SIZE}"):
        manager.get_memory_info("mine", 1, SIZE)
    with pytest.raises(CallerError, match="region 'mine' is registered already; unregister it first"):
        manager.register_cuda_shared_memory(*registered)
    del part
    manager.unregister_all()
