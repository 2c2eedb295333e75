"""Calls of other models with tensors on GPUs: what is given, wanted and lent there, who has it mapped, and how long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import ModelError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.instance import InstanceGpus
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.by_descriptor import DescriptorAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.descriptors import PRIVATE
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.forward.direct import Lending, LentMemory
from shm_backend_utils.model.forward.ordinary import Asked, Given, OrdinaryForwarding
from shm_backend_utils.model.mapping.memory import DeviceMemory, HostMemory
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.emulator.response import InferenceResponse
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import delivered, message_of, start_server
from tests.unit.forwarding.conftest import Models, config, two_models
from tests.unit.gpu.fakes import (
    BLOCK,
    DRIVER,
    INTEGERS,
    MODEL,
    SIZE,
    array_on,
    collect_all,
    content,
    kernel,
    left_of,
    runtime_that_gives_all_back,
    stream_on,
)
from tests.unit.gpu.model.conftest import DEVICE, Client, collect

INT32 = dtypes.BY_NAME["INT32"]
NUMBERS = [0, 1, 2, 3]


@pytest.fixture
def arrays(cuda: CudaRuntime) -> Iterator[InstanceGpus]:
    arrays = InstanceGpus(CudaAccess(lambda: cuda), 0)
    yield arrays
    collect_all(cuda)
    arrays.close()


def tensor_on(cuda: CudaRuntime | None) -> Any:
    return np.arange(4, dtype=INTEGERS) if cuda is None else array_on(cuda, NUMBERS, dtype=INTEGERS)


def test_an_array_on_a_gpu_is_given_as_it_is_and_copied_to_the_host(cuda: CudaRuntime, arrays: InstanceGpus) -> None:
    array = tensor_on(cuda)
    view = arrays.view("X", array, INT32, "triton", writable=False)
    for value in (array, view):
        given = Given(None, "X", value, arrays)
        assert (given.array.address, given.dtype, given.shape, given.is_plain) == (array.address, INT32, (4,), False)
        assert given.bytes_on_host().tolist() == given.elements_on_host().tolist() == NUMBERS


@pytest.mark.parametrize("is_wanted_there", [False, True], ids=["wanted on the host", "wanted on a GPU"])
@pytest.mark.parametrize("comes_from_there", [False, True], ids=["from the host", "from a GPU"])
def test_an_output_is_copied_to_where_it_is_wanted(
    cuda: CudaRuntime,
    arrays: InstanceGpus,
    monkeypatch: pytest.MonkeyPatch,
    is_wanted_there: bool,
    comes_from_there: bool,
) -> None:
    monkeypatch.setattr(TritonBackend, "request", lambda *_: object())
    start_server(monkeypatch)
    target = TensorView("Y", np.zeros(4, INTEGERS), INT32, "direct")
    if is_wanted_there:
        target = arrays.empty("Y", (4,), INT32, "direct")
        content(target.array)[...] = 0
    forwarding = OrdinaryForwarding(Asked("other", "", None, {}, {"Y": target}, ["Y"], {}), TritonBackend(), arrays)
    given = Tensor("Y", tensor_on(None))
    if comes_from_there:
        given = Tensor.from_dlpack("Y", tensor_on(cuda).__dlpack__(stream=-1))
    response = InferenceResponse([given])
    assert forwarding.result(response) == {"Y": target}
    found = content(target.array) if is_wanted_there else target.numpy()
    assert found.tolist() == NUMBERS
    monkeypatch.undo()
    del forwarding, target, given, response, found


@pytest.mark.parametrize("fence", [None, 0, 1])
def test_memory_is_lent_with_its_fence(client_cuda: CudaRuntime, cuda: CudaRuntime, fence: int | None) -> None:
    allocation = CudaAllocation(client_cuda, SIZE, 0)
    mapping = CudaMappings(cuda).map(allocation.handle, BLOCK, 0, "regions[1]")
    slots = [LentRegionClaim(f"key {number}", 64, "00" * 16, 0) for number in range(2)]
    own = [LentMemory(slot, HostMemory(np.zeros(64, np.uint8)), ((0, 64),)) for slot in slots]
    claim = claim_of_allocation(allocation, fence=fence)
    own.append(LentMemory(claim, DeviceMemory(mapping, 0, BLOCK), ((0, BLOCK),)))
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=1 << 20))) as pool:
        lending = Lending(own, pool)
        array = DeviceArray(cuda, mapping.address + 8, (4,), INTEGERS, 0, mapping.keeper)
        assert lending.place_of(array) == (1 if fence is None else 2, 8)
        claim = claim_of_allocation(allocation, fence=None if fence is None else 1, waits=False)
        assert lending.claims == [*([] if fence is None else [slots[fence]]), claim]


OTHER = 2
"""The virtual process of the other model."""


@pytest.fixture
def other_cuda(client: Client) -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back(OTHER) as cuda:
        yield cuda


@pytest.fixture
def models(client: Client, other_cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """Two models on GPU 0, each in a process of its own. The other one may answer early."""
    with runtime_that_gives_all_back(MODEL) as cuda, two_models(monkeypatch, config("other")) as models:
        models.caller.close()
        models.other.close()
        models.caller = _session("m", cuda)
        models.other = _session("other", other_cuda, gpu_events=True)
        yield models


def _session(name: str, cuda: CudaRuntime, **settings: Any) -> ShmSession:
    return ShmSession(ModelSpec.from_config(config(name)), Config(**settings), CudaAccess(lambda: cuda), DEVICE)


def forward(call: Call) -> None:
    y = call.output("Y", (4,), np.float32)
    assert call.forward("other", {"X": call.input("X")}, {"Y": y})["Y"] is y


def ask(models: Models, client: Client) -> Any:
    (response,) = models.caller.serve([client.request(0, {"Y": DEVICE}, is_for_one_request=True)], forward)
    return response


def opened() -> tuple[int, int]:
    return left_of(MODEL).opened, left_of(OTHER).opened


def test_it_is_lent_with_its_slot_and_unmapped_by_both(models: Models, client: Client, other_cuda: CudaRuntime) -> None:
    seen: list[Any] = []
    with stream_on(other_cuda) as stream:

        def answer(call: Call) -> None:
            assert call.table is not None
            seen.extend(each for each in call.table.regions if isinstance(each, CudaRegionClaim))
            call.ready_on(stream)
            x, y = call.input("X").array, call.output("Y", (4,), np.float32).array
            kernel(stream, lambda x, y: np.multiply(x, 2, out=y), x, y, process=OTHER)

        models.answer = answer
        models.change = lambda outputs: seen.append(opened())
        client.write(0, 21)
        assert ask(models, client).error() is None
    claim, at_the_others_answer = seen
    assert (claim.fence, claim.is_for_one_request, claim.waits) == (1, True, False)
    assert at_the_others_answer == (2, 0)
    assert opened() == (0, 0)
    assert client.output(0, "Y") == [42] * 4
    assert client.host.is_free(0)


def test_memory_by_descriptor_is_lent_too(models: Models, client: Client) -> None:
    made = DescriptorAllocation.make(client.cuda, BLOCK, DEVICE, PRIVATE)
    assert made is not None
    memory, seen = DRIVER.memory(made.address, (8,), np.float32), list[Any]()
    memory[:4] = 21
    x, room = InputSpan(dtypes.BY_NAME["FP32"], (4,), 1, 0, 16), OutputSpan(1, 16, 16)
    request = delivered(client.host.begin(Table({"X": x}, {"Y": room}, (made.claim,)), 0), ["Y"])

    def answer(call: Call) -> None:
        assert call.table is not None
        seen.extend([call.table.regions[1], call.input("X").attributes.cuda_ipc_handle])
        content(call.output("Y", (4,), np.float32).array)[...] = 2 * content(call.input("X").array)

    models.answer = answer
    (response,) = models.caller.serve([request], forward)
    assert isinstance(response, InferenceResponse)
    assert response.error() is None
    assert seen == [replace(made.claim, fence=1, waits=False), None]
    assert memory.tolist() == [21] * 4 + [42] * 4
    assert opened() == (1, 1)  # as long as the client has the region
    made.free()


def test_what_the_other_model_keeps_stays_borrowed_from_the_client(models: Models, client: Client) -> None:
    kept: list[Any] = []

    def answer(call: Call) -> None:
        kept.append(call.input("X").array)
        call.output("Y", (4,), np.float32)

    models.answer = answer
    client.write(0, 3)
    assert ask(models, client).error() is None
    assert client.is_over(0)
    assert opened() == (0, 1)
    assert not client.host.is_free(0), "the client would give its tensor back"
    assert kept[0].to_host().tolist() == [3] * 4
    kept.clear()
    collect(models.other)
    assert client.host.is_free(0)


def test_when_the_other_model_fails_nobody_has_it_any_more(models: Models, client: Client) -> None:
    def answer(call: Call) -> None:
        call.output("Y", (4,), np.float32)
        raise ModelError("no")

    models.answer = answer
    assert "no" in message_of(ask(models, client))
    collect(models.other)
    collect(models.caller)
    assert opened() == (0, 0)
    assert client.host.is_free(0)


def test_a_client_that_takes_its_slot_back_meanwhile_waits_for_both(models: Models, client: Client) -> None:
    looked: list[bool] = []

    def answer(call: Call) -> None:
        client.region.record(0).begin(client.host.generations[0] + 1, b"")
        client.host.generations[0] += 1
        looked.append(client.host.is_free(0))
        call.put("Y", call.input("X"))

    models.answer = answer
    ask(models, client)
    assert looked == [False]
    collect(models.caller)
    assert opened() == (0, 0)
    assert client.host.is_free(0)
