"""What a caller or a model can do wrong: each has an error of its own, and the next call is served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import (
    BudgetError,
    DeadlineExceededError,
    InferenceError,
    InputMissingError,
    PoolOptions,
    ShmClient,
    TimeoutValueError,
)
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import (
    CallerError,
    ClosedError,
    MissingTensorError,
    PeerError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
)
from shm_backend_utils.testing.harness import ModelHarness
from tests.crash.either_client import AwaitedClient
from tests.crash.gate import Gate
from tests.e2e.flavours import AnyClient, Flavour

MODELS = ("boastful", "crash_stages", "every_input", "identity", "misbehaving", "plain", "repeat")
X: Final = np.arange(5, dtype=np.float32)
SHAPE: Final = {"INPUT0": (X.shape, X.dtype)}

shared_paths = pytest.mark.parametrize("path", ["direct", "triton-shm"])


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ({"Q": X}, TensorNameError, "model 'repeat' has no input 'Q'; it has X"),
        ({"X": X.astype(np.int32)}, TensorTypeError, "'X' is INT32, but the model's configuration says TYPE_FP32"),
        ({"X": X.astype(np.complex64)}, TensorTypeError, "NumPy dtype complex64"),
        ({"X": X[None]}, TensorShapeError, "'X' has shape \\[1, 5\\], but the model's configuration says \\[-1\\]"),
    ],
    ids=["name", "dtype", "unsupported dtype", "shape"],
)
def test_an_input_that_the_model_does_not_take_is_refused(
    client: AnyClient, inputs: Any, kind: type[Exception], message: str
) -> None:
    described = {name: (array.shape, array.dtype) for name, array in inputs.items()}
    for use in (
        lambda: client.infer("repeat", inputs),
        lambda: client.submit("repeat", inputs).result(),
        lambda: client.prepare("repeat", described),
    ):
        with pytest.raises(kind, match=message) as failure:
            use()
        assert type(failure.value) is kind
    with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": 1}) as result:
        np.testing.assert_array_equal(result["Y"], X)


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
    with pytest.raises(PeerError, match="does its model.py use ShmSession"):
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


def test_an_endless_time_to_wait_is_refused_or_waited_but_has_not_passed_at_once(client: AnyClient) -> None:
    try:
        with client.infer("identity", {"INPUT0": X}, timeout_s=math.inf) as result:
            np.testing.assert_array_equal(result["OUTPUT0"], X)
    except TimeoutValueError as refusal:
        assert "timeout_s is inf" in str(refusal)  # noqa: PT017  # either is right


@pytest.mark.parametrize(
    ("named", "kind", "message"),
    [
        ({"colour": "red"}, TypeError, "no keyword argument 'colour'; expected some of compression, headers"),
        ({"path": "shortcut"}, CallerError, "path is 'shortcut'; expected one of auto, direct, triton-shm, inline"),
        ({"compression": "lzma"}, CallerError, "compression is 'lzma'; expected 'gzip' or 'deflate'"),
        ({"parameters": {"shm_io": 1}}, CallerError, "'shm_io' is written by the client itself"),
        ({"parameters": {"shm_slot": 1}}, CallerError, "'shm_slot' is written by the client itself"),
        ({"parameters": {"shm_generation": 1}}, CallerError, "'shm_generation' is written by the client itself"),
        (
            {"outputs": {"OUTPUT0": -1}},
            CallerError,
            "hint for output 'OUTPUT0' is -1; expected bytes, 0 or more, or \\(shape, dtype\\)",
        ),
    ],
    ids=["keyword", "path", "compression", "shm_io", "shm_slot", "shm_generation", "hint"],
)
def test_what_cannot_be_said_beside_the_tensors_is_refused(
    client: AnyClient, named: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.infer("identity", {"INPUT0": X}, **named)


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


@pytest.mark.parametrize(
    ("deed", "complaint"),
    [
        ("raise", "RuntimeError: the model gave up"),
        ("raise after writing", "RuntimeError: the model gave up late"),
        ("wrong dtype", "'Y' is FP64, but the model's configuration says TYPE_FP32"),
        ("wrong shape", "'Y' has shape [5, 1]"),
        ("unknown output", "has no output 'Z'"),
        ("unknown input", "has no input 'W'"),
        ("write nothing", "output 'Y' was requested, but model.py wrote none"),
        ("write an input", "read-only"),
    ],
)
def test_a_misbehaving_model_fails_its_request_and_serves_the_next(
    client: AnyClient, deed: str, complaint: str
) -> None:
    for _ in range(2):
        with pytest.raises(InferenceError) as failure:
            client.infer("misbehaving", {"X": X}, parameters={"deed": deed})
        assert complaint in failure.value.message()
    with client.infer("misbehaving", {"X": X}, parameters={"deed": "behave"}) as result:
        np.testing.assert_array_equal(result["Y"], X)


def test_a_call_can_be_inferred_again_after_the_model_failed(client: AnyClient) -> None:
    with client.prepare("misbehaving", {"X": ((3,), np.float32)}, parameters={"deed": "raise"}) as call:
        for _ in range(2):
            with pytest.raises(InferenceError, match="gave up"):
                call.infer()
