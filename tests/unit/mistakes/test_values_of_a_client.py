"""What everybody gets wrong at first: one line says what was found, what was expected, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.inputs.descriptions import described_inputs, wanted_outputs
from shm_backend_utils.client.inputs.sources import sources
from shm_backend_utils.client.options import check_options
from shm_backend_utils.client.prepared import PreparedCall
from shm_backend_utils.client.result import Result
from shm_backend_utils.client.transports.http.codec import Answer, HttpCodec
from shm_backend_utils.client.transports.messages import split_url
from shm_backend_utils.errors import CallerError, ClosedError, TensorError, TensorShapeError, TensorTypeError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.origin import Origin

IMAGES = {"name": "X", "data_type": "TYPE_FP32", "dims": [3]}
SPEC = ModelSpec.from_config({"name": "m", "max_batch_size": 4, "input": [IMAGES], "output": [IMAGES]})
FP32 = dtypes.BY_NAME["FP32"]


@pytest.mark.parametrize("url", [None, 8001, b"localhost:8001"])
def test_a_url_that_is_no_text(url: Any) -> None:
    with pytest.raises(CallerError) as error:
        split_url(url)
    assert str(error.value) == f"the URL is {url!r}; expected a str, for example 'localhost:8001'"


@pytest.mark.parametrize("pool", [2**30, {"max_bytes": 2**30}])
def test_a_pool_that_is_no_pool_options(pool: Any) -> None:
    with pytest.raises(CallerError) as error:
        ClientMemory(pool, CudaAccess())
    assert str(error.value) == f"pool is {pool!r}; expected PoolOptions(max_bytes=...)"


@pytest.mark.parametrize("make", [lambda inputs: sources(SPEC, inputs), described_inputs])
@pytest.mark.parametrize(("inputs", "kind"), [([1.0], "list"), (np.ones(3), "ndarray"), (None, "NoneType")])
def test_inputs_without_names(make: Any, inputs: Any, kind: str) -> None:
    with pytest.raises(CallerError, match=f"^inputs is of type {kind}; expected a mapping of input names to "):
        make(inputs)


@pytest.mark.parametrize(
    "description", [np.ones((2, 3), np.float32), np.float32, (3,), [], 4, "FP32", ((3,), "f4", "cuda:0", 1)]
)
def test_a_prepared_input_that_is_not_described(description: Any) -> None:
    with pytest.raises(
        TensorShapeError,
        match=r"^input 'X' is described by .*; expected \(shape, dtype\), for example \(\(1, 3\), 'float32'\)",
    ):
        described_inputs({"X": description})


@pytest.mark.parametrize("hint", [np.ones(1000), [np.ones(1000)], object(), 1.5, -1, "gpu", ((3,), "f4", object())])
def test_a_hint_that_is_none(hint: Any) -> None:
    """In one line, without elements and addresses: people give the array that they want filled."""
    with pytest.raises(TensorError, match="^the (hint for output|device of tensor) 'Y' is ") as error:
        wanted_outputs({"Y": hint})
    assert "\n" not in str(error.value)
    assert " at 0x" not in str(error.value)


@pytest.mark.parametrize("shape", [6, np.float32])
def test_a_shape_that_is_no_sequence(shape: Any) -> None:
    with pytest.raises(TensorShapeError) as error:
        described_inputs({"X": (shape, np.float32)})
    assert str(error.value) == f"tensor 'X' has shape {shape!r}; expected a sequence of whole numbers, 0 or more"


@pytest.mark.parametrize("dtype", ["FP32", "TYPE_FP32", "flaot32", 7])
def test_a_dtype_that_numpy_does_not_know(dtype: Any) -> None:
    with pytest.raises(TensorTypeError) as error:
        described_inputs({"X": ((2, 3), dtype)})
    assert str(error.value) == (
        f"tensor 'X' has dtype {dtype!r}, which NumPy does not know; expected for example np.float32 or 'float32'"
    )


@pytest.mark.parametrize("outputs", [3, np.float32(1), object])
def test_outputs_that_are_no_names(outputs: Any) -> None:
    with pytest.raises(CallerError) as error:
        wanted_outputs(outputs)
    assert str(error.value) == f"outputs is {outputs!r}; expected a list of names, or a mapping"


def test_another_dtype_than_the_models() -> None:
    with pytest.raises(TensorTypeError) as error:
        SPEC.input("X").check(dtypes.BY_NAME["FP64"], (1, 3))
    assert str(error.value) == (
        "tensor 'X' is FP64, but the model's configuration says TYPE_FP32; convert it by .astype('float32')"
    )


def test_a_batch_dimension_that_is_forgotten() -> None:
    with pytest.raises(TensorShapeError) as error:
        SPEC.input("X").check(FP32, (3,))
    assert str(error.value) == (
        "tensor 'X' has shape [3], but the model's configuration says [-1, 3] (-1 is any size); "
        "the first dimension is the batch: one row has shape [1, 3], as array[np.newaxis] has"
    )


def test_a_size_below_zero() -> None:
    with pytest.raises(TensorShapeError) as error:
        SPEC.output("X").check_shape((-1, 3))
    assert str(error.value) == "tensor 'X' has shape [-1, 3]; expected sizes of 0 or more"


def test_the_timeout_of_tritonclient() -> None:
    with pytest.raises(TypeError) as error:
        check_options({"client_timeout": 5.0})  # type: ignore[typeddict-unknown-key]
    assert str(error.value) == "there is no keyword argument 'client_timeout'; use timeout_s, in seconds"


def test_a_port_that_speaks_http_and_is_not_tritons() -> None:
    with pytest.raises(InferenceError) as error:
        HttpCodec().told(Answer(200, {}, b"# HELP nv_inference_request_success Number of\n# TYPE"))
    assert str(error.value) == (
        "[200] the server answers '# HELP nv_inference_request_success Number of\\n# TY', which is not "
        "JSON; is this Triton's HTTP port? By default HTTP is on 8000, and metrics are on 8002"
    )


def test_an_output_that_the_result_does_not_have() -> None:
    result = Result({"Y": np.ones(1), "Z": np.ones(1)}, "direct", lambda: None)
    with pytest.raises(KeyError) as error:
        result["X"]
    assert error.value.args == ("the result has no output 'X'; it has Y, Z",)
    assert result.get("X") is None
    assert "X" not in result


def prepared() -> PreparedCall:
    arrays = {"X": np.zeros((1, 3), np.float32)}
    exchange: Any = SimpleNamespace(arrays=lambda: arrays, close=lambda: None)
    call: Any = SimpleNamespace(exchange=exchange, settings=SimpleNamespace(origin=Origin.here("prepare")))
    core: Any = SimpleNamespace(is_forked=False, is_closed=True)
    return PreparedCall(core, call, 1.0, SimpleNamespace())  # type: ignore[arg-type]


def test_a_prepared_input_that_is_replaced_and_not_filled() -> None:
    with prepared() as call, pytest.raises(TypeError) as error:
        call.inputs["X"] = np.ones((1, 3), np.float32)  # type: ignore[index]
    assert (
        str(error.value) == "input 'X' is memory to be filled, and cannot be replaced; write inputs['X'][...] = array"
    )


def test_a_prepared_input_that_is_misspelt() -> None:
    with prepared() as call:
        with pytest.raises(KeyError) as error:
            call.inputs["x"]
        assert error.value.args == ("this call has no input 'x'; it has X; did you mean 'X'?",)
        assert list(call.inputs) == ["X"]
        assert len(call.inputs) == 1
        assert "x" not in call.inputs
    with pytest.raises(ClosedError):
        call.inputs["X"]
