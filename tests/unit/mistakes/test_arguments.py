"""Arguments that are called otherwise here, or elsewhere, or are none: each is told what to write."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.client.inputs.descriptions import described_inputs, wanted_outputs
from shm_backend_utils.client.prepared import PreparedCall
from shm_backend_utils.client.transports.messages import split_url
from shm_backend_utils.errors import CallerError, ClosedError, TensorError, TensorShapeError, TensorTypeError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.origin import Origin
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X = np.ones(3, np.float32)


@pytest.fixture
def client() -> Iterator[ShmClient]:
    with FakeServer(config("m")) as server, client_of(server) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("client_timeout", "use timeout_s, in seconds"),
        ("model_name", "give the model's name as the first argument, model"),
        ("request_compression_algorithm", "use compression, which is for both directions"),
        ("response_compression_algorithm", "use compression, which is for both directions"),
        ("query_params", "use parameters, which Triton passes on to the model"),
        ("callback", "use submit(), whose future has add_done_callback(), or AsyncShmClient"),
        ("frames", "only stream() has frames"),
        ("device", "say outputs={'OUTPUT0': 'cuda:0'}; inputs are used where they are"),
    ],
)
def test_a_keyword_of_tritonclient_or_of_another_method(client: ShmClient, name: str, remedy: str) -> None:
    wrong: Any = {name: 5}
    with pytest.raises(TypeError) as error:
        client.infer("m", {"IN0": X}, **wrong)
    assert str(error.value) == f"there is no keyword argument {name!r}; {remedy}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("timout_s", "timeout_s"),
        ("time_out", "timeout"),
        ("requestid", "request_id"),
        ("output", "outputs"),
        ("streams", "stream"),
    ],
)
def test_a_keyword_that_is_misspelt(client: ShmClient, name: str, meant: str) -> None:
    wrong: Any = {name: 5}
    with pytest.raises(TypeError) as error:
        client.infer("m", {"IN0": X}, **wrong)
    assert str(error.value) == (
        f"there is no keyword argument {name!r}; expected some of compression, headers, model_version, parameters, "
        "priority, request_id, sequence_end, sequence_id, sequence_start, timeout, inputs, library, model, outputs, "
        f"path, stream, timeout_s; did you mean {meant!r}?"
    )


def test_a_batch_that_only_infer_can_split(client: ShmClient) -> None:
    wrong: Any = {"split": True}
    methods: list[Any] = [client.submit, client.prepare, client.stream]
    for method in methods:
        with pytest.raises(TypeError) as error:
            method("m", {"IN0": X}, **wrong)
        assert str(error.value) == "there is no keyword argument 'split'; only infer() can split a batch"


def test_what_tritonclient_takes_too_is_taken(client: ShmClient) -> None:
    client.infer("m", {"IN0": X}, request_id="7", priority=1, headers={"a": "b"}, timeout=1000, model_version="1")


def test_inputs_before_the_model(client: ShmClient) -> None:
    wrong: Any = {"IN0": X}
    with pytest.raises(CallerError) as error:
        client.infer(wrong, "m")  # type: ignore[arg-type]
    assert str(error.value) == "model is of type dict; expected a str: the model's name comes first"


def test_a_list_of_inputs(client: ShmClient) -> None:
    wrong: Any = [X]
    with pytest.raises(CallerError) as error:
        client.infer("m", wrong)
    assert str(error.value) == (
        "inputs is of type list; expected a mapping of input names to array, for example {'INPUT0': array}"
    )


class InferRequestedOutput:
    """Named as tritonclient's."""


def test_outputs_of_tritonclient(client: ShmClient) -> None:
    wrong: Any = [InferRequestedOutput()]
    with pytest.raises(CallerError) as error:
        client.infer("m", {"IN0": X}, outputs=wrong)
    assert str(error.value) == (
        "outputs has an element of type InferRequestedOutput; expected names of outputs, as str"
    )


@pytest.mark.parametrize("outputs", [["OUT"], {"OUT": 100}, ["out0"]])
@pytest.mark.parametrize("path", ["direct", "triton-shm", "inline"])
def test_an_output_that_is_misspelt(client: ShmClient, outputs: Any, path: Any) -> None:
    with pytest.raises(KeyError) as error:
        client.infer("m", {"IN0": X}, outputs=outputs, path=path)
    assert str(error.value) == f"model 'm' has no output {next(iter(outputs))!r}; it has OUT0; did you mean 'OUT0'?"


def test_an_output_that_is_like_none(client: ShmClient) -> None:
    with pytest.raises(KeyError) as error:
        client.infer("m", {"IN0": X}, outputs=["probabilities"])
    assert str(error.value) == "model 'm' has no output 'probabilities'; it has OUT0"


def test_a_name_as_long_as_can_be_is_not_compared(client: ShmClient) -> None:
    with pytest.raises(KeyError) as error:
        client.infer("m", {"IN0": X}, outputs=["OUT0" + " " * 61])
    assert str(error.value).endswith("'; it has OUT0")


def test_a_result_is_not_tritonclients(client: ShmClient) -> None:
    with client.infer("m", {"IN0": X}) as result:
        with pytest.raises(AttributeError) as error:
            result.as_numpy("OUT0")
        assert str(error.value) == ("a Result has no attribute 'as_numpy'; an output is result['OUTPUT0'], of any name")
        with pytest.raises(AttributeError, match="^a Result has no attribute 'shape'$"):
            result.shape  # noqa: B018
        with pytest.raises(AttributeError, match=r"^a Result has no attribute 'OUT0'; the output is result\['OUT0'\]$"):
            result.OUT0  # noqa: B018


@pytest.mark.parametrize("timeout_s", [np.float32(5), np.float64(5), np.int64(5)])
def test_a_time_of_numpy_is_a_time(client: ShmClient, timeout_s: Any) -> None:
    client.infer("m", {"IN0": X}, timeout_s=timeout_s)


def test_a_parameter_of_numpy(client: ShmClient) -> None:
    with pytest.raises(CallerError) as error:
        client.infer("m", {"IN0": X}, parameters={"times": np.int64(3)})
    assert str(error.value) == (
        f"parameter 'times' is {np.int64(3)!r}; expected a str, a bool, an int of 64 bits, or a float; write .item() "
        "for a number of NumPy"
    )


@pytest.mark.parametrize("name", ["max_bytes", "max_device_bytes", "max_batch_bytes", "stream_guess_bytes"])
@pytest.mark.parametrize("value", ["1G", 1e9])
def test_a_budget_that_is_no_number_of_bytes(name: str, value: Any) -> None:
    wrong: Any = {name: value}
    with pytest.raises(CallerError) as error:
        PoolOptions(**wrong)
    assert str(error.value) == f"PoolOptions.{name} is {value!r}; expected a whole number of bytes, such as 2**30"


@pytest.mark.parametrize("name", ["max_batch_bytes", "stream_guess_bytes"])
def test_a_budget_that_has_a_number_of_its_own(name: str) -> None:
    wrong: Any = {name: None}
    with pytest.raises(CallerError, match=f"PoolOptions.{name} is None; expected a whole number of bytes"):
        PoolOptions(**wrong)


def test_a_budget_of_numpy_is_a_budget() -> None:
    PoolOptions(max_bytes=np.int64(2**30), stream_guess_bytes=np.uint32(0))


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
