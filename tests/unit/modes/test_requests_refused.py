"""Requests that ask for what they may not, and calls that are used when they are over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import (
    ClosedError,
    MissingTensorError,
    ModelError,
    StaleRequestError,
    TableError,
    TensorNameError,
)
from shm_backend_utils.memory import locks
from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping import further_regions, policy
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, message_of, outputs_of
from tests.unit.modes.doubling import FP32, Open, X, double
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

DESCRIPTOR = {"v": 1, "model": "m", "regions": [], "inputs": {}, "outputs": {}}


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def error_of(open_session: Open, request: InferenceRequest, **more: Any) -> str:
    (response,) = open_session(**more).serve([request], double)
    return message_of(response)


@pytest.mark.parametrize("generation", [0, -1, None, "1", 1.0, True])
def test_a_generation_that_is_none_is_refused(open_session: Open, client: Client, generation: Any) -> None:
    request = client.request({"X": X}, {"Y": 16}, shm_generation=generation)
    assert error_of(open_session, request).startswith("shm:table: shm_generation: found")
    assert client.is_free()


def test_the_first_generation_is_1(open_session: Open, client: Client) -> None:
    assert error_of(open_session, client.request({"X": X}, {"Y": 16})) == ""


def test_a_descriptor_for_another_model_leaves_the_delivered_tensors(open_session: Open) -> None:
    said = {"shm_io": json.dumps({**DESCRIPTOR, "model": "another"})}
    (response,) = open_session().serve([delivered(said, ["Y"], {"X": X})], double)
    assert outputs_of(response)["Y"].tolist() == (X * 2).tolist()
    assert "speaks to another model" in error_of(open_session, delivered(said, ["Y"]))


def test_a_descriptor_for_another_model_leaves_the_slots_tensors(open_session: Open, client: Client) -> None:
    said = json.dumps({**DESCRIPTOR, "model": "another"})
    assert error_of(open_session, client.request({"X": X}, {"Y": 16}, shm_io=said)) == ""
    assert client.output("Y").tolist() == (X * 2).tolist()


def test_a_delivered_tensor_that_the_configuration_does_not_have_is_no_input(open_session: Open) -> None:
    def infer(call: Call) -> None:
        with pytest.raises(TensorNameError, match="'Z'"):
            call.input("Z")
        double(call)

    (response,) = open_session().serve([delivered({}, ["Y"], {"X": X, "Z": X})], infer)
    assert response.error() is None


def test_a_descriptor_of_nothing_leaves_the_delivered_tensors(open_session: Open) -> None:
    said = {"shm_io": json.dumps(DESCRIPTOR)}
    (response,) = open_session().serve([delivered(said, ["Y"], {"X": X})], double)
    assert outputs_of(response)["Y"].tolist() == (X * 2).tolist()


@pytest.mark.parametrize("name", ["shm_io", "shm_slot"])
def test_a_model_that_does_not_serve_the_direct_path_takes_no_memory(
    open_session: Open, client: Client, name: str
) -> None:
    request = client.request({"X": X}, {"Y": 16})
    if name == "shm_io":
        request = delivered({"shm_io": json.dumps(DESCRIPTOR)}, ["Y"], {"X": X})
    assert f"{name}: found something, expected nothing" in error_of(
        open_session, request, parameters={"SHM_PATHS": "triton-shm"}
    )


def test_a_descriptor_beside_a_slot_is_refused(open_session: Open, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16}, shm_io=json.dumps(DESCRIPTOR))
    assert "found a descriptor beside shm_slot" in error_of(open_session, request)
    assert client.is_free()


def test_a_model_that_serves_the_direct_path_alone_takes_no_plain_request(open_session: Open, client: Client) -> None:
    direct = {"parameters": {"SHM_PATHS": "direct"}}
    assert "allows only the direct path" in error_of(open_session, delivered({}, ["Y"], {"X": X}), **direct)
    assert error_of(open_session, client.request({"X": X}, {"Y": 16}), **direct) == ""
    assert error_of(open_session, delivered({}, ["Y"], {"X": X})) == ""


def test_rows_are_compared_with_the_carrier_where_there_are_batches_alone(open_session: Open, client: Client) -> None:
    assert error_of(open_session, client.request({"X": X}, {"Y": 16})) == ""
    batched = {
        "inputs": [tensor("X"), tensor("SHM", "UINT8")],
        "max_batch_size": 4,
    }
    x = np.ones((2, 2), np.float32)
    for rows, error in ((None, "the request has none"), (3, "the request has one of 3"), (2, "")):
        delivered = {} if rows is None else {"SHM": np.empty((rows, 0), np.uint8)}
        request = client.request({"X": x}, {"Y": 16}, delivered=delivered)
        found = error_of(open_session, request, **batched)
        assert error in found
        assert bool(error) == bool(found)


def test_a_call_that_is_over_gives_nothing(open_session: Open, client: Client) -> None:
    calls: list[Call] = []

    def infer(call: Call) -> None:
        with pytest.raises(MissingTensorError):
            call.input("Z")
        assert call.find_input("Z") is None
        calls.append(call)
        double(call)

    inputs = [tensor("X"), tensor("Z")]
    open_session(inputs).serve([client.request({"X": X}, {"Y": 16})], infer)
    (call,) = calls
    for use in (
        lambda: call.input("X"),
        lambda: call.find_input("X"),
        lambda: call.find_input("Z"),
        lambda: call.inputs,
        lambda: call.output("Y", (4,), np.float32),
        lambda: call.put("Y", X),
        lambda: call.forward("m", {}),
    ):
        with pytest.raises(ClosedError, match="this call"):
            use()


def test_a_call_that_is_not_begun_gives_nothing(open_session: Open, client: Client) -> None:
    call = open_session().open(client.request({"X": X}, {"Y": 16}))
    with pytest.raises(ModelError, match="this call has not begun; enter it first"):
        call.find_input("X")


# Further regions


def test_a_lent_region_needs_a_lender() -> None:
    with pytest.raises(TableError, match="regions: found a lent region, expected none"):
        further_regions.check_lender(None)


def test_memory_of_a_gpu_needs_the_slot_that_it_says_to_be_fenced_by() -> None:
    claim = CudaRegionClaim(bytes(64), 4096, "00" * 16, 0)
    nothing: Any = None
    with pytest.raises(TableError, match="regions.fence: found 0, expected none"):
        further_regions.fence_of(Table({}, {}, (claim,)), claim, None, nothing)


def test_a_region_that_is_lent_twice_is_refused(open_session: Open, client: Client) -> None:
    lender = Client()
    claim = LentRegionClaim(
        client.region.segment.key, client.region.header.byte_size, client.region.header.token.hex(), 0
    )
    span = InputSpan(FP32, (4,), 1, client.data, 16)
    said = Table({"X": span}, {"Y": OutputSpan(2, client.data, 16)}, (claim, claim))
    error = error_of(open_session, delivered(lender.begin(said), ["Y"]))
    assert "regions[2]: found a region that is named before, expected every region once" in error
    assert client.is_free()
    lender.close()


def test_a_lender_that_dies_while_its_memory_is_borrowed_is_noticed(
    open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = Client()
    header = client.region.header
    claim = LentRegionClaim(client.region.segment.key, header.byte_size, header.token.hex(), 0)
    said = Table({"X": InputSpan(FP32, (4,), 1, client.data, 16)}, {}, (claim,))
    request = delivered(lender.begin(said), ["Y"])
    real = locks.borrow

    def borrow(fd: int, record: int) -> Any:
        lender.region.segment.unlink()
        lender.region.close()
        return real(fd, record)

    monkeypatch.setattr(policy, "borrow", borrow)
    with pytest.raises(StaleRequestError, match="is gone"), open_session().open(request):
        pass
    assert client.is_free()
