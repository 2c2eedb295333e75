"""What is wrong fails alone, is named, writes nothing, and tells no secret."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import InferenceError, PathUnavailableError, ServerUnavailableError, ShmClient
from shm_backend_utils.errors import CallerError, ClosedError, PeerError, SlotInDoubtError, TensorError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.named import MAX_DESCRIPTOR_LENGTH
from shm_backend_utils.server import EmbeddedServer

ROW = np.array([[1, 2, 3, 4]], np.float32)


@dataclass
class HandMade:
    """A region and a valid descriptor for `batch_witness`, to be broken by a test, sent by plain tritonclient."""

    region: ManagedRegion
    descriptor: dict[str, Any]
    grpc: Any
    generation: object = 5

    def send(self, parameter: object = None, *, batch_size: int = 1, model: str = "batch_witness") -> Any:
        carrier = tritonclient.grpc.InferInput("SHM", [batch_size, 0], "UINT8")
        carrier.set_data_from_numpy(np.empty((batch_size, 0), np.uint8))
        value = json.dumps(self.descriptor) if parameter is None else parameter
        parameters = {"shm_io": value, "shm_generation": self.generation}
        return self.grpc.infer(model, [carrier], parameters=parameters, client_timeout=30)

    def bytes(self) -> bytes:
        return self.region.bytes().tobytes()


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    region = ManagedRegion.create(4096)
    record = region.record(0)
    record.generation = 5
    begin = region.data_offset
    region.bytes()[begin : begin + 16] = ROW.view(np.uint8).ravel()
    descriptor = {
        "v": 1,
        "model": "batch_witness",
        "regions": [
            {
                "kind": "system",
                "key": region.segment.key,
                "byte_size": region.header.byte_size,
                "token": region.header.token.hex(),
                "slot": 0,
            }
        ],
        "inputs": {"X": [0, begin, 16, "FP32", [1, 4]]},
        "outputs": {"Y": [0, begin + 256, 16], "REQUEST_COUNT": [0, begin + 512, 4]},
    }
    grpc = tritonclient.grpc.InferenceServerClient(triton_server.grpc_url)
    try:
        yield HandMade(region, descriptor, grpc)
    finally:
        grpc.close()
        region.segment.unlink()
        region.close()


def test_the_hand_made_descriptor_works_as_long_as_nothing_breaks_it(hand_made: HandMade) -> None:
    hand_made.send()
    begin = hand_made.region.data_offset + 256
    np.testing.assert_array_equal(hand_made.region.bytes()[begin : begin + 16].view(np.float32), ROW[0] + 1)
    assert hand_made.region.record(0).completed == 5


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(descriptor: dict[str, Any]) -> None:
        place: Any = descriptor
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


LIES = {
    "unknown version": (_set("v", to=2), "INVALID_ARGUMENT", "shm_io.v"),
    "no version": (_set("v", to=None), "INVALID_ARGUMENT", "shm_io.v"),
    "unknown field": (_set("regions", 0, "colour", to="red"), "INVALID_ARGUMENT", "regions[0].colour"),
    "unknown kind": (_set("regions", 0, "kind", to="disk"), "INVALID_ARGUMENT", "regions[0].kind"),
    "wrong type": (_set("inputs", "X", 1, to="0"), "INVALID_ARGUMENT", "inputs.X[1]"),
    "boolean for a number": (_set("inputs", "X", 0, to=False), "INVALID_ARGUMENT", "inputs.X[0]"),
    "negative offset": (_set("inputs", "X", 1, to=-1), "INVALID_ARGUMENT", "inputs.X[1]"),
    "overflowing offset": (_set("inputs", "X", 1, to=2**63), "INVALID_ARGUMENT", "inputs.X[1]"),
    "overflowing end": (_set("outputs", "Y", 1, to=2**63 - 8), "INVALID_ARGUMENT", "outputs.Y"),
    "out of bounds": (_set("outputs", "Y", 2, to=1 << 20), "INVALID_ARGUMENT", "outputs.Y"),
    "no such region": (_set("outputs", "Y", 0, to=1), "INVALID_ARGUMENT", "outputs.Y[0]"),
    "output over an input": (_set("outputs", "Y", 1, to=8192), "INVALID_ARGUMENT", "outputs.Y"),
    "output over the header": (_set("outputs", "Y", 1, to=0), "INVALID_ARGUMENT", "outputs.Y[1]"),
    "size that is not the shape's": (_set("inputs", "X", 2, to=12), "INVALID_ARGUMENT", "inputs.X[2]"),
    "region larger than it is": (_set("regions", 0, "byte_size", to=1 << 30), "INVALID_ARGUMENT", "regions[0]"),
    "region smaller than it is": (_set("regions", 0, "byte_size", to=12287), "INVALID_ARGUMENT", "regions[0]"),
    "wrong token": (_set("regions", 0, "token", to="0" * 32), "INVALID_ARGUMENT", "token"),
    "no such slot": (_set("regions", 0, "slot", to=1), "INVALID_ARGUMENT", "regions[0].slot"),
    "key of nobody": (_set("regions", 0, "key", to="shmbu-0-nobody"), "NOT_FOUND", "regions[0]"),
    "key of the Python backend": (
        _set("regions", 0, "key", to="triton_python_backend_shm_region_0"),
        "INVALID_ARGUMENT",
        "regions[0].key",
    ),
    "key that climbs": (_set("regions", 0, "key", to="shmbu-../../etc/passwd"), "INVALID_ARGUMENT", "regions[0].key"),
    "wrong dtype": (_set("inputs", "X", 3, to="INT32"), "INVALID_ARGUMENT", "'X'"),
    "unknown dtype": (_set("inputs", "X", 3, to="FP128"), "INVALID_ARGUMENT", "inputs.X[3]"),
    "wrong shape": (_set("inputs", "X", 4, to=[2, 2]), "INVALID_ARGUMENT", "'X'"),
    "another batch size": (_set("inputs", "X", to=[0, 8192, 32, "FP32", [2, 4]]), "INVALID_ARGUMENT", "'X'"),
    "unknown input": (_set("inputs", "Q", to=[0, 8192, 16, "FP32", [1, 4]]), "INVALID_ARGUMENT", "'Q'"),
    "missing input": (_set("inputs", to={}), "INVALID_ARGUMENT", "'X'"),
    "wrong model": (_set("model", to="multiply"), "INVALID_ARGUMENT", "'X'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_descriptor_is_refused(hand_made: HandMade, lie: str) -> None:
    change, code, field = LIES[lie]
    change(hand_made.descriptor)
    data = hand_made.bytes()[hand_made.region.data_offset :]
    with pytest.raises(InferenceServerException) as refusal:
        hand_made.send()
    assert refusal.value.status() == f"StatusCode.{code}"
    message = refusal.value.message()
    assert field in message
    assert hand_made.region.segment.key not in message
    assert hand_made.region.header.token.hex() not in message
    assert "/dev/shm" not in message or "share" in message  # the remedy names the folder, nothing names a file in it
    assert hand_made.bytes()[hand_made.region.data_offset :] == data


@pytest.mark.parametrize(
    ("parameter", "complaint"),
    [
        ("not JSON", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[]", "a JSON object"),
        ("x" * (MAX_DESCRIPTOR_LENGTH + 1), str(MAX_DESCRIPTOR_LENGTH)),
        (7, "a string"),
        (True, "a string"),
    ],
    ids=["garbled", "deep", "array", "oversized", "number", "boolean"],
)
def test_what_is_no_descriptor_is_refused(hand_made: HandMade, parameter: object, complaint: str) -> None:
    with pytest.raises(InferenceServerException, match="shm_io") as refusal:
        hand_made.send(parameter)
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert complaint in refusal.value.message()


@pytest.mark.parametrize(
    ("generation", "code"),
    [
        (4, "CANCELLED"),
        (6, "CANCELLED"),
        (0, "INVALID_ARGUMENT"),
        (-5, "INVALID_ARGUMENT"),
        ("5", "INVALID_ARGUMENT"),
        (True, "INVALID_ARGUMENT"),
    ],
    ids=["stale", "future", "zero", "negative", "string", "boolean"],
)
def test_a_generation_that_is_not_the_slots_is_refused(hand_made: HandMade, generation: object, code: str) -> None:
    hand_made.generation = generation
    before = hand_made.bytes()
    with pytest.raises(InferenceServerException, match="shm_generation") as refusal:
        hand_made.send()
    assert refusal.value.status() == f"StatusCode.{code}"
    assert hand_made.bytes() == before


def test_a_stale_generation_is_refused_where_the_descriptor_was_seen_before(hand_made: HandMade) -> None:
    hand_made.send()
    hand_made.region.record(0).generation = 7
    before = hand_made.bytes()
    hand_made.generation = 6
    with pytest.raises(InferenceServerException, match="given this request up"):
        hand_made.send()
    assert hand_made.bytes() == before


def test_a_request_is_executed_once(hand_made: HandMade) -> None:
    hand_made.send()
    before = hand_made.bytes()
    with pytest.raises(InferenceServerException, match="executed before") as refusal:
        hand_made.send()
    assert refusal.value.status() == "StatusCode.ALREADY_EXISTS"
    assert hand_made.bytes() == before


def test_a_region_that_was_made_anew_under_its_key_is_a_new_region(hand_made: HandMade) -> None:
    hand_made.send()
    old = hand_made.region.bytes()
    key = hand_made.region.segment.key
    hand_made.region.segment.unlink()
    hand_made.generation = 6
    hand_made.region.record(0).generation = 6
    before = old.tobytes()
    with pytest.raises(InferenceServerException, match="regions\\[0\\]") as refusal:
        hand_made.send()
    assert refusal.value.status() == "StatusCode.NOT_FOUND"
    assert key not in refusal.value.message()
    assert old.tobytes() == before


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
        hand_made.descriptor["regions"][0]["token"] = "f" * 32
        together.wait(timeout=30)
        try:
            hand_made.send()
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


def test_the_descriptor_parameter_belongs_to_the_client(client: ShmClient) -> None:
    with pytest.raises(CallerError, match="'shm_io' is written by the client itself"):
        client.infer("identity", {"INPUT0": np.zeros(1, np.float32)}, parameters={"shm_io": "{}"})


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
