"""What a caller or a model can do wrong: each has an error of its own, and the next call is served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import BudgetError, DeadlineExceededError, InferenceError, PoolOptions, ShmClient
from shm_backend_utils.client.errors import InputMissingError, TimeoutValueError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ClosedError, MissingTensorError, PeerError, TensorNameError
from shm_backend_utils.testing.harness import ModelHarness
from tests.crash.gate import Gate
from tests.e2e.flavours import AnyClient, AwaitedClient, Flavour

MODELS = ("boastful", "crash_stages", "every_input", "identity", "misbehaving", "plain", "repeat")
X: Final = np.arange(5, dtype=np.float32)
SHAPE: Final = {"INPUT0": (X.shape, X.dtype)}

shared_paths = pytest.mark.parametrize("path", ["direct", "triton-shm"])


def test_an_output_that_the_model_does_not_have_is_refused(client: AnyClient) -> None:
    with pytest.raises(TensorNameError, match="model 'repeat' has no output 'Z'; it has Y, RUNS"):
        client.infer("repeat", {"X": X}, outputs=["Z"])


def test_an_input_that_the_configuration_requires_is_missed_before_anything_is_sent(client: AnyClient) -> None:
    with pytest.raises(MissingTensorError, match="model 'plain' needs input 'X', which the call does not") as failure:
        client.infer("plain", {})
    assert not isinstance(failure.value, InputMissingError)
    assert failure.value.tensor == "X"


def test_an_input_that_only_the_model_requires_is_missed_by_the_model(client: AnyClient, path: PathName) -> None:
    with pytest.raises(InputMissingError, match="the request has no input 'X', which the model needs") as failure:
        client.infer("every_input", {"W": X}, path=path)
    assert isinstance(failure.value, MissingTensorError)
    assert failure.value.tensor == "X"


def test_a_model_that_does_not_exist(client: AnyClient) -> None:
    with pytest.raises(InferenceError, match="unknown model: 'nonesuch'"):
        client.infer("nonesuch", {})


def test_a_model_that_only_says_that_it_is_shm_enabled(client: AnyClient) -> None:
    with pytest.raises(PeerError, match="check that its model.py uses ShmSession"):
        client.infer("boastful", {"X": X})


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


@shared_paths
def test_a_request_beyond_the_whole_budget_fails_at_once(flavour: Flavour, path: PathName) -> None:
    with flavour.client(pool=PoolOptions(max_bytes=1 << 16)) as client:
        with pytest.raises(BudgetError, match="bytes of shared memory, but the pool may have 65536; raise PoolOptions"):
            client.infer("identity", {"INPUT0": np.zeros(1 << 16, np.float32)}, path=path)
        client.infer("identity", {"INPUT0": X}, outputs={"OUTPUT0": X.nbytes}, path=path).release()


@shared_paths
def test_a_deadline_that_passes_leaves_the_client_as_it_was(client: AnyClient, path: PathName, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}, path=path).release()  # all is warm
    gate.close()
    parameters = gate.parameters("half written")
    with pytest.raises(DeadlineExceededError, match="the server did not answer before the deadline") as failure:
        client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}, path=path, parameters=parameters, timeout_s=0.3)
    assert isinstance(failure.value, TimeoutError)
    gate.wait_for_model()
    gate.let_go()
    with client.infer("crash_stages", {"X": 3 * X}, outputs={"Y": X.nbytes}, path=path) as result:
        np.testing.assert_array_equal(result["Y"], 3 * X + 1)
