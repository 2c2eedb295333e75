"""What is wrong fails alone, is named, writes nothing, and tells no secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import InferenceError, PathUnavailableError, ServerUnavailableError, ShmClient
from shm_backend_utils.errors import CallerError, ClosedError, PeerError, SlotInDoubtError, TensorError
from shm_backend_utils.server import EmbeddedServer

from .hand_made import FIRST_GENERATION, HandMade
from .hand_made import hand_made as made_for

ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A valid request, to be broken."""
    with made_for(triton_server.grpc_url, "batch_witness", {"X": ROW}, {"Y": 16, "REQUEST_COUNT": 4}) as request:
        yield request


def sent(request: HandMade) -> Any:
    return request.infer([request.carrier(1)])


def test_the_hand_made_request_works_as_long_as_nothing_breaks_it(hand_made: HandMade) -> None:
    sent(hand_made)
    np.testing.assert_array_equal(hand_made.output("Y", np.float32), ROW[0] + 1)
    assert hand_made.record.completed == FIRST_GENERATION


@pytest.mark.parametrize(
    ("generation", "status", "code"),
    [
        (4, "CANCELLED", "shm:stale"),
        (6, "CANCELLED", "shm:stale"),
        (2**63 - 1, "CANCELLED", "shm:stale"),
        (0, "INVALID_ARGUMENT", "shm:table"),
        (-5, "INVALID_ARGUMENT", "shm:table"),
        ("5", "INVALID_ARGUMENT", "shm:table"),
        (True, "INVALID_ARGUMENT", "shm:table"),
    ],
    ids=["stale", "future", "largest", "zero", "negative", "string", "boolean"],
)
def test_a_generation_that_is_not_the_slots_is_refused(
    hand_made: HandMade, generation: object, status: str, code: str
) -> None:
    hand_made.generation = generation
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match=f"^.*{code}: .*shm_generation") as refusal:
        sent(hand_made)
    assert refusal.value.status() == f"StatusCode.{status}"
    assert hand_made.content() == before


def test_a_request_without_a_generation_is_refused(hand_made: HandMade) -> None:
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:table: shm_generation: found no such number"):
        hand_made.client(hand_made.url).infer(
            "batch_witness", [hand_made.carrier(1)], parameters={"shm_slot": str(hand_made.address)}
        )
    assert hand_made.content() == before


def test_a_stale_generation_is_refused_where_the_slot_was_used_before(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.recorded = 7
    hand_made.generation = 6
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="given this request up"):
        sent(hand_made)
    assert hand_made.content() == before


def test_a_request_is_executed_once(hand_made: HandMade) -> None:
    sent(hand_made)
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:replayed: .*executed before") as refusal:
        sent(hand_made)
    assert refusal.value.status() == "StatusCode.ALREADY_EXISTS"
    assert hand_made.content() == before


def test_a_generation_below_one_that_was_executed_is_a_replay(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.recorded = hand_made.generation = FIRST_GENERATION - 1
    with pytest.raises(InferenceServerException, match="shm:replayed: "):
        sent(hand_made)


def test_a_region_that_was_removed_is_gone_though_it_is_mapped(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.region.segment.unlink()
    hand_made.next()
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:gone: shm_slot") as refusal:
        sent(hand_made)
    assert refusal.value.status() == "StatusCode.NOT_FOUND"
    assert hand_made.region.segment.key not in refusal.value.message()
    assert hand_made.content() == before


def test_the_other_requests_of_a_batch_succeed(hand_made: HandMade, triton_server: EmbeddedServer) -> None:
    together = threading.Barrier(4)
    seen: list[int] = []
    refusals: list[str] = []

    def honest(row: int) -> None:
        with ShmClient(triton_server.grpc_url) as client:
            together.wait(timeout=30)
            with client.infer("batch_witness", {"X": np.full((1, 4), row, np.float32)}) as result:
                assert (result["Y"] == row + 1).all()
                seen.append(int(result["REQUEST_COUNT"][0, 0]))

    def lying() -> None:
        hand_made.address.token = "f" * 32
        together.wait(timeout=30)
        try:
            sent(hand_made)
        except InferenceServerException as error:
            refusals.append(error.message())

    threads = [threading.Thread(target=honest, args=(row,)) for row in range(3)] + [threading.Thread(target=lying)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 3
    assert max(seen) > 1
    assert len(refusals) == 1


@pytest.mark.parametrize(
    ("deed", "complaint"),
    [
        ("raise", "RuntimeError: the model gave up"),
        ("raise after writing", "RuntimeError: the model gave up late"),
        ("wrong dtype", "'Y' is FP64, but the model's configuration says TYPE_FP32"),
        ("wrong shape", "'Y' has shape [3, 1]"),
        ("unknown output", "has no output 'Z'"),
        ("unknown input", "has no input 'W'"),
        ("write nothing", "output 'Y' was requested, but model.py wrote none"),
        ("write an input", "read-only"),
    ],
)
def test_a_misbehaving_model_fails_its_request_and_serves_the_next(
    client: ShmClient, deed: str, complaint: str
) -> None:
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(InferenceError) as failure:
        client.infer("misbehaving", {"X": x}, parameters={"deed": deed})
    assert complaint in failure.value.message()
    with client.infer("misbehaving", {"X": x}, parameters={"deed": "behave"}) as result:
        np.testing.assert_array_equal(result["Y"], x)


def test_a_call_can_be_inferred_again_after_the_model_failed(client: ShmClient) -> None:
    with client.prepare("misbehaving", {"X": ((3,), np.float32)}, parameters={"deed": "raise"}) as call:
        for _ in range(2):
            with pytest.raises(InferenceError, match="gave up"):
                call.infer()


def test_a_missing_input_is_named(client: ShmClient) -> None:
    with pytest.raises(InferenceError, match="no input 'X', which the model needs"):
        client.infer("misbehaving", {}, parameters={"deed": "behave"})


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({"X": np.zeros(3)}, "'X' is FP64, but the model's configuration says TYPE_FP32"),
        ({"X": np.zeros((3, 1), np.float32)}, "'X' has shape \\[3, 1\\]"),
        ({"X": np.zeros(3, np.complex64)}, "NumPy dtype complex64"),
        ({"Q": np.zeros(3, np.float32)}, "has no input 'Q'; it has X"),
    ],
    ids=["dtype", "shape", "unsupported dtype", "name"],
)
def test_the_client_refuses_what_the_model_would(client: ShmClient, inputs: Any, complaint: str) -> None:
    with pytest.raises(TensorError, match=complaint):
        client.infer("repeat", inputs, parameters={"times": 1})


def test_a_batch_that_is_too_large_is_refused(client: ShmClient) -> None:
    with pytest.raises(TensorError, match="a batch of 9, but model 'batch_witness' takes 1 to 8"):
        client.infer("batch_witness", {"X": np.zeros((9, 4), np.float32)})


def test_an_unknown_output_is_refused(client: ShmClient) -> None:
    with pytest.raises(TensorError, match="has no output 'Z'; it has OUTPUT0"):
        client.infer("identity", {"INPUT0": np.zeros(1, np.float32)}, outputs=["Z"])


def test_a_server_that_is_not_there(url: str) -> None:
    scheme = url.partition("://")[0] if "://" in url else "grpc"
    with pytest.raises(ServerUnavailableError, match="no Triton server answers at .*; is it running") as failure:
        ShmClient(f"{scheme}://127.0.0.1:1")
    assert isinstance(failure.value, ConnectionError)
    assert str(failure.value).count("no Triton server") == 1


def test_a_model_that_does_not_exist(client: ShmClient) -> None:
    with pytest.raises(InferenceError, match="unknown model: 'nonesuch'"):
        client.infer("nonesuch", {})


def test_a_model_that_is_not_shm_enabled(client: ShmClient) -> None:
    with pytest.raises(PathUnavailableError, match='set the parameter SHM_PATHS to "direct,triton-shm,inline"'):
        client.infer("plain", {"X": np.zeros(1, np.float32)}, path="direct")


def test_a_model_that_only_says_that_it_is_shm_enabled(client: ShmClient) -> None:
    with pytest.raises(PeerError, match="does its model.py use ShmSession"):
        client.infer("boastful", {"X": np.zeros(1, np.float32)})


def test_an_unknown_scheme() -> None:
    with pytest.raises(CallerError, match="expected HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT"):
        ShmClient("ftp://localhost:21")


@pytest.mark.parametrize("name", ["shm_slot", "shm_generation", "shm_io"])
def test_the_parameters_of_the_protocol_belong_to_the_client(client: ShmClient, name: str) -> None:
    with pytest.raises(CallerError, match=f"'{name}' is written by the client itself"):
        client.infer("identity", {"INPUT0": np.zeros(1, np.float32)}, parameters={name: "{}"})


def test_closed_objects_say_so(url: str) -> None:
    x = np.zeros(1, np.float32)
    client = ShmClient(url)
    call = client.prepare("identity", {"INPUT0": ((1,), np.float32)})
    result = client.infer("identity", {"INPUT0": x})
    result.release()
    result.release()
    with pytest.raises(ClosedError, match="this result is closed"):
        result["OUTPUT0"]
    call.close()
    call.close()
    with pytest.raises(ClosedError, match="this call is closed"):
        call.infer()
    client.close()
    client.close()
    with pytest.raises(ClosedError, match="this client is closed"):
        client.infer("identity", {"INPUT0": x})


def test_memory_is_not_used_again_while_a_model_may_write_to_it(url: str) -> None:
    with ShmClient(url) as client, client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as call:
        call.inputs["QUESTION"][:] = [0, 1]
        call.infer().release()  # everything is warm, so that the next request is executed before its deadline
        call.inputs["QUESTION"][:] = 0
        with pytest.raises(TimeoutError):
            call.infer(timeout_s=0.5)
        with pytest.raises(SlotInDoubtError, match="infer again later, or prepare another call"):
            call.infer()
        with client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as another:
            another.inputs["QUESTION"][:] = [8, 9]
            call.inputs["QUESTION"][1] = 1  # lets the model, which still runs, come to its end
            with another.infer() as result:
                np.testing.assert_array_equal(result["ANSWER"], [9, 10])
        call.inputs["QUESTION"][:] = [5, 6]
        with call.infer() as result:
            np.testing.assert_array_equal(result["ANSWER"], [6, 7])
