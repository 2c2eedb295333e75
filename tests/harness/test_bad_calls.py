"""What calls say beside their tensors, and what callers and models do wrong: each has an error of its own."""

from __future__ import annotations

import json
import math
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import BudgetError, InferenceError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.errors import InputMissingError, TimeoutValueError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ClosedError, MissingTensorError, PeerError, TensorNameError
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.flavours import AnyClient, AwaitedClient, Flavour

MODELS = ("adder", "boastful", "call_facts", "identity", "plain", "repeat", "request_facts")
X: Final = np.arange(5, dtype=np.float32)
SHAPE: Final = {"INPUT0": (X.shape, X.dtype)}


@pytest.mark.parametrize(
    ("model", "inputs", "error", "said"),
    [
        ("repeat", {"X": X}, TensorNameError, "model 'repeat' has no output 'Z'; it has Y, RUNS"),
        ("plain", {}, MissingTensorError, "model 'plain' needs input 'X', which the call does not"),
        ("nonesuch", {}, InferenceError, "unknown model: 'nonesuch'"),
        ("boastful", {"X": X}, PeerError, "check that its model.py uses ShmSession"),
    ],
)
def test_a_call_that_is_wrong(client: AnyClient, model: str, inputs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as failure:
        client.infer(model, inputs, outputs=["Z"] if model == "repeat" else None)
    assert not isinstance(failure.value, InputMissingError)


@pytest.mark.parametrize("path", ["direct", "inline"])
def test_an_input_that_only_the_model_requires_is_missed_by_the_model(client: AnyClient, path: PathName) -> None:
    with pytest.raises(InputMissingError, match="the request has no input 'B', which the model needs") as failure:
        client.infer("adder", {"A": X}, path=path)
    assert isinstance(failure.value, MissingTensorError)
    assert failure.value.tensor == "B"


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan])
def test_a_time_to_wait_is_above_zero(flavour: Flavour, client: AnyClient, timeout_s: float) -> None:
    complaint = f"timeout_s is {timeout_s}; expected a number of seconds above 0"
    with client.prepare("identity", SHAPE) as call:
        for use in (
            lambda: flavour.client(timeout_s=timeout_s),
            lambda: client.infer("identity", {"INPUT0": X}, timeout_s=timeout_s),
            lambda: client.prepare("identity", SHAPE, timeout_s=timeout_s),
            lambda: call.infer(timeout_s=timeout_s),
        ):
            with pytest.raises(TimeoutValueError, match=complaint):
                use()


@pytest.mark.parametrize("make", [ShmClient, AwaitedClient])
def test_what_is_closed_says_so(harness: ModelHarness, path: PathName, make: Any) -> None:
    with make(harness) as client:
        closed, call = (client.prepare("identity", SHAPE, path=path) for _ in range(2))
        closed.close()
        closed.close()
        with pytest.raises(ClosedError, match="this call is closed"):
            closed.infer()
        client.close()
        client.close()
        for use in (
            lambda: client.infer("identity", {"INPUT0": X}),
            lambda: client.prepare("identity", SHAPE),
            lambda: client.submit("identity", {"INPUT0": X}).result(),
            lambda: list(client.stream("identity", {"INPUT0": X})),
            lambda: client.explain("identity"),
            client.stats,
            call.infer,
        ):
            with pytest.raises(ClosedError, match="this client is closed; make a new one"):
                use()
        call.close()


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_a_request_beyond_the_whole_budget_fails_at_once(flavour: Flavour, path: PathName) -> None:
    with flavour.client(pool=PoolOptions(max_bytes=1 << 16)) as client:
        with pytest.raises(BudgetError, match="bytes of shared memory, but the pool may have 65536; raise PoolOptions"):
            client.infer("identity", {"INPUT0": np.zeros(1 << 16, np.float32)}, path=path)
        client.infer("identity", {"INPUT0": X}, outputs={"OUTPUT0": X.nbytes}, path=path).release()


def facts_in(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result["FACTS"].tobytes())
    return told


def test_a_prepared_call_keeps_its_options(client: AnyClient, path: PathName) -> None:
    options: dict[str, Any] = {"request_id": "seven", "parameters": {"a": 1}, "path": path}
    with client.prepare("request_facts", {"X": (X.shape, X.dtype)}, **options) as call:
        for _ in range(2):
            with call.infer() as result:
                told = facts_in(result)
                assert (told["request_id"], told["parameters"]) == ("seven", {"a": 1})


def test_a_call_knows_its_place_in_a_sequence_if_it_has_one(client: AnyClient, path: PathName) -> None:
    with client.infer("call_facts", {"X": X}, path=path) as result:
        assert facts_in(result) == {"request_id": "", "sequence": None, "left_s": None, "cancelled": False}
    for sequence in ([7, True, False], [(1 << 63) - 1, False, False], ["order 66", False, True], [8, True, True]):
        named: dict[str, Any] = dict(zip(("sequence_id", "sequence_start", "sequence_end"), sequence, strict=True))
        with client.infer("call_facts", {"X": X}, path=path, **named) as result:
            assert facts_in(result)["sequence"] == sequence


def test_small_and_large_calls_side_by_side_get_their_own(flavour: Flavour) -> None:
    with flavour.client(inline_bytes=2**12) as client:
        for count in (1, 100, 10_000, 3, 300, 30_000, 0, 5):
            x = np.arange(count, dtype=np.float32)
            with client.infer("identity", {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                np.testing.assert_array_equal(result["OUTPUT0"], x)
                assert result.path == ("inline" if count <= 500 else "direct")
