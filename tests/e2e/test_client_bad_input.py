"""What a caller can get wrong: each has an exception of its own, which says what was found and what to do instead."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import (
    AsyncShmClient,
    BudgetError,
    DeadlineExceededError,
    InputMissingError,
    OutputRoomError,
    PoolExhaustedError,
    PoolOptions,
    ShmClient,
    TimeoutValueError,
)
from shm_backend_utils.client.inputs.descriptions import OutputHint
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import (
    BatchSizeError,
    CallerError,
    ClosedError,
    MissingTensorError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
)
from shm_backend_utils.server import EmbeddedServer
from tests.crash.either_client import FLAVOURS, TWO_FLAVOURS, EitherClient, open_client, url_of
from tests.crash.gate import Gate

X = np.arange(5, dtype=np.float32)
PATHS: tuple[PathName, ...] = ("direct", "triton-shm", "inline")
SHARED_PATHS = PATHS[:2]
NO_TIMES = (0, -1, math.nan)
ONE_SLOT = PoolOptions(max_bytes=1 << 16)
MOST_OF_IT = np.zeros(6_000, np.float32)
ROOM_FOR_IT: dict[str, OutputHint] = {"OUTPUT0": MOST_OF_IT.nbytes}


@pytest.fixture(params=TWO_FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(flavour: str, triton_server: EmbeddedServer) -> str:
    return url_of(triton_server, flavour)


@pytest.fixture
def client(flavour: str, url: str) -> Iterator[EitherClient]:
    with open_client(flavour, url, timeout_s=30) as client:
        yield client


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ({"Q": X}, TensorNameError, "model 'repeat' has no input 'Q'; it has X"),
        ({"X": X.astype(np.int32)}, TensorTypeError, "'X' is INT32, but the model's configuration says TYPE_FP32"),
        ({"X": X[None]}, TensorShapeError, "'X' has shape \\[1, 5\\], but the model's configuration says \\[-1\\]"),
    ],
    ids=["name", "dtype", "shape"],
)
def test_an_input_that_the_model_does_not_take_is_refused(
    client: EitherClient, inputs: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as failure:
        client.infer("repeat", inputs, parameters={"times": 1})
    assert type(failure.value) is kind
    with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": 1}) as result:
        np.testing.assert_array_equal(result["Y"], X)


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ({"Q": ((5,), np.float32)}, TensorNameError),
        ({"X": ((5,), np.int32)}, TensorTypeError),
        ({"X": ((1, 5), np.float32)}, TensorShapeError),
    ],
    ids=["name", "dtype", "shape"],
)
def test_nor_can_a_call_with_it_be_prepared(client: EitherClient, inputs: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as failure:
        client.prepare("repeat", inputs)
    assert type(failure.value) is kind


def test_an_output_that_the_model_does_not_have_is_refused(client: EitherClient) -> None:
    with pytest.raises(TensorNameError, match="model 'repeat' has no output 'Z'; it has Y, RUNS"):
        client.infer("repeat", {"X": X}, outputs=["Z"])


def test_an_input_that_the_configuration_requires_is_missed_before_anything_is_sent(client: EitherClient) -> None:
    with pytest.raises(MissingTensorError, match="model 'plain' needs input 'X', which the call does not") as failure:
        client.infer("plain", {})
    assert not isinstance(failure.value, InputMissingError)
    assert failure.value.tensor == "X"


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("path", ["direct", "inline"])
def test_an_input_that_only_the_model_requires_is_missed_by_the_model(client: EitherClient, path: PathName) -> None:
    with pytest.raises(InputMissingError, match="the request has no input 'X', which the model needs") as failure:
        client.infer("every_input", {"W": X}, path=path)
    assert isinstance(failure.value, MissingTensorError)
    assert failure.value.tensor == "X"


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_that_is_too_large_could_be_split(client: EitherClient, path: PathName) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 9, but model 'batch_witness' takes 1 to 8; split=True"):
        client.infer("batch_witness", {"X": np.zeros((9, 4), np.float32)}, path=path)


def test_a_batch_of_nothing_could_not_be_split(client: EitherClient) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 0, but model 'batch_witness' takes 1 to 8") as failure:
        client.infer("batch_witness", {"X": np.zeros((0, 4), np.float32)})
    assert "split" not in str(failure.value)


def test_a_hint_that_is_too_small_does_no_harm_on_the_direct_path(client: EitherClient) -> None:
    with client.infer("repeat", {"X": X}, outputs={"Y": 4}, parameters={"times": 3}, path="direct") as result:
        assert result.overflowed == {"Y": 60}
        np.testing.assert_array_equal(result["Y"], np.tile(X, 3))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_hint_that_is_too_small_is_an_error_where_the_output_has_no_other_way(client: EitherClient) -> None:
    call: dict[str, Any] = {"parameters": {"times": 3}, "path": "triton-shm"}
    with pytest.raises(OutputRoomError, match="needs more bytes than its hint gave it.*give a larger hint, or none"):
        client.infer("repeat", {"X": X}, outputs={"Y": 4}, **call)
    with client.infer("repeat", {"X": X}, outputs={"Y": 60}, **call) as result:
        np.testing.assert_array_equal(result["Y"], np.tile(X, 3))


@pytest.mark.parametrize("timeout_s", NO_TIMES)
def test_a_time_to_wait_is_above_zero(client: EitherClient, timeout_s: float) -> None:
    complaint = f"timeout_s is {timeout_s}; expected a number of seconds above 0"
    with pytest.raises(TimeoutValueError, match=complaint):
        client.infer("identity", {"INPUT0": X}, timeout_s=timeout_s)
    with pytest.raises(TimeoutValueError, match=complaint):
        client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}, timeout_s=timeout_s)
    with (
        client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}) as call,
        pytest.raises(TimeoutValueError, match=complaint),
    ):
        call.infer(timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", NO_TIMES)
def test_so_is_that_of_a_client(flavour: str, url: str, timeout_s: float) -> None:
    with (
        pytest.raises(TimeoutValueError, match=f"timeout_s is {timeout_s}; expected"),
        open_client(flavour, url, timeout_s=timeout_s),
    ):
        pass


def test_an_endless_time_to_wait_is_refused_or_waited_but_has_not_passed_at_once(client: EitherClient) -> None:
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
        ({"parameters": {"shm_generation": 1}}, CallerError, "'shm_generation' is written by the client itself"),
        (
            {"outputs": {"OUTPUT0": -1}},
            CallerError,
            "hint for output 'OUTPUT0' is -1; expected bytes, 0 or more, or \\(shape, dtype\\)",
        ),
    ],
    ids=["keyword", "path", "compression", "parameter", "hint"],
)
def test_what_cannot_be_said_beside_the_tensors_is_refused(
    client: EitherClient, named: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.infer("identity", {"INPUT0": X}, **named)


def test_a_client_has_no_unknown_path_either(flavour: str, url: str) -> None:
    with (
        pytest.raises(CallerError, match="path is 'shortcut'; expected one of"),
        open_client(flavour, url, path="shortcut"),
    ):
        pass


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_client_says_so(client: EitherClient, path: PathName) -> None:
    call = client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}, path=path)
    client.close()
    client.close()
    for use in (
        lambda: client.infer("identity", {"INPUT0": X}),
        lambda: client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}),
        client.stats,
        call.infer,
    ):
        with pytest.raises(ClosedError, match="this client is closed; make a new one"):
            use()
    call.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_call_says_so(client: EitherClient, path: PathName) -> None:
    call = client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}, path=path)
    call.close()
    call.close()
    with pytest.raises(ClosedError, match="this call is closed"):
        call.infer()


@pytest.mark.parametrize("path", PATHS)
def test_a_released_result_says_so(client: EitherClient, path: PathName) -> None:
    result = client.infer("identity", {"INPUT0": X}, path=path)
    result.release()
    result.release()
    with pytest.raises(ClosedError, match="this result is closed"):
        result["OUTPUT0"]


@pytest.mark.parametrize("path", SHARED_PATHS)
def test_a_pool_that_has_run_dry_fails_the_call_in_its_time_and_serves_the_next(
    flavour: str, url: str, path: PathName
) -> None:
    with open_client(flavour, url, timeout_s=30, pool=ONE_SLOT) as client:
        held = client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, path=path)
        with pytest.raises(PoolExhaustedError, match="within 0.\\d+ s: 1 slots are held.*raise PoolOptions") as failure:
            client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, path=path, timeout_s=0.1)
        assert isinstance(failure.value, TimeoutError)
        held.release()
        client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, path=path).release()


def test_a_pool_that_has_run_dry_names_the_line_that_holds_it(triton_server: EmbeddedServer) -> None:
    with ShmClient(triton_server.grpc_url, pool=ONE_SLOT) as client:
        result = client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT)
        holder = f"1 by infer at {__file__}:{_line() - 1}"
        with pytest.raises(PoolExhaustedError, match=holder):
            client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, timeout_s=0.1)
        result.release()


def test_so_it_does_for_tasks(triton_server: EmbeddedServer) -> None:
    async def run_dry() -> None:
        async with AsyncShmClient(triton_server.grpc_url, pool=ONE_SLOT) as client:
            result = await client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT)
            holder = f"1 by infer at {__file__}:{_line() - 1}"
            with pytest.raises(PoolExhaustedError, match=holder):
                await client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, timeout_s=0.1)
            result.release()

    asyncio.run(run_dry())


@pytest.mark.parametrize("path", SHARED_PATHS)
def test_a_request_beyond_the_whole_budget_fails_at_once(flavour: str, url: str, path: PathName) -> None:
    with open_client(flavour, url, timeout_s=30, pool=ONE_SLOT) as client:
        with pytest.raises(BudgetError, match="bytes of shared memory, but the pool may have 65536; raise PoolOptions"):
            client.infer("identity", {"INPUT0": np.zeros(1 << 16, np.float32)}, path=path)
        client.infer("identity", {"INPUT0": MOST_OF_IT}, outputs=ROOM_FOR_IT, path=path).release()


@pytest.mark.parametrize("path", SHARED_PATHS)
def test_a_deadline_that_passes_leaves_the_client_as_it_was(
    client: EitherClient, path: PathName, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}, path=path).release()  # all is warm
    gate.close()
    parameters = gate.parameters("half written")
    with pytest.raises(DeadlineExceededError, match="the server did not answer before the deadline") as failure:
        client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}, path=path, parameters=parameters, timeout_s=0.5)
    assert isinstance(failure.value, TimeoutError)
    gate.wait_for_model()
    gate.let_go()
    with client.infer("crash_stages", {"X": 3 * X}, outputs={"Y": X.nbytes}, path=path) as result:
        np.testing.assert_array_equal(result["Y"], 3 * X + 1)


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno
