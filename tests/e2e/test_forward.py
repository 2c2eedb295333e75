"""Calls from model to model: on the client's own memory where the other model shares memory, else as usual."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, Result, ShmClient
from shm_backend_utils.client.options import PathName
from tests.releases import takes_floats

from ..crash.gate import Gate
from .eventually import all_memory_comes_back, eventually

X = np.array([1, 2, 3, 4], np.float32)
ROOM = {"Y": X.nbytes, "FACTS": 8192}


@pytest.fixture
def client(grpc_client: ShmClient) -> ShmClient:
    return grpc_client


def delegated(client: ShmClient, way: str, model: str = "identity", **parameters: Any) -> tuple[list[float], Any]:
    parameters = {"way": way, "model": model, **parameters}
    path = parameters.pop("path", "direct")
    with client.infer("delegate", {"X": X}, parameters=parameters, outputs=ROOM, path=path) as result:
        assert result.path == path
        return result["Y"].tolist(), facts(result)


def facts(result: Result) -> Any:
    return json.loads(result["FACTS"].tobytes())


@pytest.mark.every_region
def test_what_the_other_model_passes_through_is_where_the_client_wrote_it(client: ShmClient) -> None:
    parameters = {"way": "forward", "model": "identity"}
    with client.prepare("delegate", {"X": ((1000,), np.float32)}, outputs=ROOM, parameters=parameters) as call:
        call.inputs["X"][:] = np.arange(1000)
        with call.infer() as result:
            assert facts(result)["path"] == "direct"
            assert not facts(result)["is_writable"]
            assert result["Y"].ctypes.data == call.inputs["X"].ctypes.data
            assert result["Y"].tolist() == list(range(1000))


@pytest.mark.every_region
def test_the_other_model_writes_to_the_clients_own_memory(client: ShmClient, gate: Gate) -> None:
    """The client sees the first half while the other model still stands half way."""
    parameters = {"way": "forward_into", "model": "crash_stages", **gate.parameters("half written")}
    inputs = {"X": (X.shape, np.float32)}
    with client.prepare("delegate", inputs, outputs=ROOM, parameters=parameters) as call:
        call.inputs["X"][:] = 0
        y = call.infer()["Y"]  # a view: the next answer will appear here
        assert y.tolist() == [1, 1, 1, 1]
        call.inputs["X"][:] = X
        gate.close()
        answer = in_thread(call.infer)
        gate.wait_for_model()
        assert y.tolist() == [2, 3, 1, 1]
        gate.let_go()
        result = answer.result()
        assert y.tolist() == [2, 3, 4, 5]
        assert facts(result)["path"] == "direct"
        assert facts(result)["is_target"]
        del result, answer


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    return ThreadPoolExecutor(1).submit(work)


def test_the_result_is_right_whichever_way_the_tensors_came(client: ShmClient, path: PathName) -> None:
    for way, model, expected in (
        ("forward", "identity", X),
        ("forward", "crash_stages", X + 1),
        ("forward_into", "crash_stages", X + 1),
        ("forward_own", "crash_stages", X + 1),
        ("forward_twice", "crash_stages", X + 3),
        ("forward_rows", "rows", 2 * X),
    ):
        for _ in range(2):  # the second time, sizes are known
            values, _ = delegated(client, way, model, path=path)
            assert values == expected.tolist(), way
    for _ in range(2):
        values, told = delegated(client, "forward_words", "words", path=path)
        assert values == [1, 2, 3, 4]
        assert told["words"] == ["X", "XX", "XXX", "XXXX"]
    assert told["path"] == "direct"
    all_memory_comes_back(client)


@pytest.mark.parametrize("way", ["forward", "forward_into", "forward_own"])
def test_a_model_that_shares_no_memory_gets_an_ordinary_request(client: ShmClient, way: str) -> None:
    values, told = delegated(client, way, "unaware")
    assert values == X.tolist()
    assert told["path"] == ("direct" if way == "forward_into" else "triton")


def test_parameters_and_version_reach_the_other_model_and_nothing_of_the_protocol_with_them(client: ShmClient) -> None:
    for version in ("1", "2"):
        _, told = delegated(client, "tell", "request_facts", version=version, share=5)
        assert told["told"]["version"] == version
        assert told["told"]["path"] == "direct"
        assert told["told"]["parameters"] == {"share": 5}


RATIO = "parameter 'ratio' is 0.5, which this Triton does not pass on"


@pytest.mark.parametrize(
    ("way", "model", "parameters", "complaint"),
    [
        ("forward", "nonesuch", {}, "model 'nonesuch' cannot be called: the server has no such model ready"),
        ("forward", "misbehaving", {"deed": "raise"}, "RuntimeError: the model gave up"),
        ("forward", "misbehaving", {"deed": "write nothing"}, "output 'Y' was requested, but model.py wrote none"),
        ("forward", "boastful", {}, "model 'boastful' answered without having used the shared memory"),
        ("forward_doubles", "identity", {}, "'INPUT0' is FP64, but the model's configuration says TYPE_FP32"),
        ("forward_into", "repeat", {"times": 2}, "as FP32 of shape [8], but the memory for it is FP32 of shape [4]"),
        pytest.param("forward", "identity", {"ratio": 0.5}, RATIO, marks=takes_floats),
        pytest.param("forward", "unaware", {"ratio": 0.5}, RATIO, marks=takes_floats),
        ("forward", "countdown", {}, "model 'countdown' is decoupled: "),
        ("forward", "delegate", {}, "model 'delegate' would be called on its own behalf (delegate → delegate)"),
        ("forward", "relay", {"to": "delegate"}, "(delegate → relay → delegate), and wait for itself for ever"),
    ],
)
def test_what_goes_wrong_there_is_an_error_here(
    client: ShmClient, way: str, model: str, parameters: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InferenceError) as failure:
        delegated(client, way, model, **parameters)
    assert complaint in failure.value.message()
    assert delegated(client, "forward", "crash_stages")[0] == (X + 1).tolist()
    del failure
    all_memory_comes_back(client)


def test_scratch_memory_is_used_again(client: ShmClient) -> None:
    def forwarded() -> set[Path]:
        pid = delegated(client, "forward_twice", "crash_stages")[1]["pid"]
        return set(Path("/dev/shm").glob(f"shmbu-{pid}-*"))

    forwarded()
    before = forwarded()
    assert before
    assert [forwarded() for _ in range(20)] == [before] * 20


def test_calls_of_one_request_go_on_side_by_side(client: ShmClient, gate: Gate) -> None:
    gate.close()
    parameters = {"way": "both", **gate.parameters("half written")}
    answer = in_thread(lambda: client.infer("delegate_async", {"X": X}, parameters=parameters))
    gate.wait_for_model()
    assert answer.result()["Y"].tolist() == (2 * X + 1).tolist()
    del answer


def test_requests_of_one_execute_are_served_side_by_side(client: ShmClient, path: PathName) -> None:
    values = [np.full((1, 4), 10 * index, np.float32) for index in range(2)]
    futures = [client.submit("rendezvous", {"X": value}, path=path) for value in values]
    assert [future.result()["Y"].tolist() for future in futures] == [(value + 2).tolist() for value in values]


@pytest.mark.needs_triton("2.47", "older ones answer for a coroutine when the calls that it has begun have ended")
@pytest.mark.parametrize("way", ["leave", "cancel"])
def test_memory_is_not_used_while_a_model_not_awaited_works(
    client: ShmClient, gate: Gate, tmp_path: Path, way: str
) -> None:
    gate.close()
    leave = tmp_path / "leave"
    parameters = {"way": way, "leave": str(leave), **gate.parameters("half written")}
    answer = in_thread(lambda: client.infer("delegate_async", {"X": X}, outputs={"Y": X.nbytes}, parameters=parameters))
    gate.wait_for_model()
    leave.touch()
    error = answer.exception()
    assert isinstance(error, InferenceError)
    assert "model.py has left the call while 1 calls of other models were under way" in error.message()
    del error, answer
    eventually(lambda: client.stats().quarantined == 1)
    for _ in range(3):
        assert delegated(client, "forward")[0] == X.tolist()
    assert client.stats().quarantined == 1
    gate.let_go()
    all_memory_comes_back(client)
