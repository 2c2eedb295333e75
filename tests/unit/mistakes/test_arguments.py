"""Arguments that are called otherwise here, or are none; and what authors of models get wrong at first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import Access, AsyncShmClient, InferenceError, PoolOptions, RequestOptions, ShmClient
from shm_backend_utils.client.core import ClientMemory
from shm_backend_utils.client.inputs.sources import described_inputs, wanted_outputs
from shm_backend_utils.client.transports.messages import split_url
from shm_backend_utils.errors import CallerError, ClosedError, TensorError, TensorShapeError, TensorTypeError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import delivered, error_of, message_of
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of
from tests.unit.sessions import session_of, tensor

X = np.ones(3, np.float32)


@pytest.fixture
def client() -> Iterator[ShmClient]:
    with FakeServer(config("m")) as server, client_of(server) as client:
        yield client


KEYWORDS = {
    "client_timeout": "use timeout_s, in seconds",
    "timeout": "use timeout_s, in seconds, or queue_timeout_us, for the server's queue",
    "request_compression_algorithm": "use compression, which is for both directions",
    "response_compression_algorithm": "use compression, which is for both directions",
    "query_params": "use parameters, which Triton passes on to the model",
    "callback": "use submit(), whose future has add_done_callback(), or AsyncShmClient",
    "frames": "only stream() has frames",
    "device": "use outputs={'OUTPUT0': 'cuda:0'}; inputs are used where they are",
    "stream": "use cuda_stream, for the streams of a GPU",
}
ARGUMENTS = [
    *sorted(RequestOptions.__annotations__),
    *["cuda_stream", "frames", "inputs", "library", "model", "outputs", "path", "split", "timeout_s"],
]
MISSPELT = {"timout_s": "timeout_s", "frame": "frames", "cuda_streams": "cuda_stream", "splits": "split"}


@pytest.mark.parametrize("name", [*KEYWORDS, *MISSPELT])
def test_a_keyword_that_is_misspelt_or_of_tritonclient_or_of_another_method(client: ShmClient, name: str) -> None:
    remedy = KEYWORDS.get(name) or f"expected some of {', '.join(ARGUMENTS)}; did you mean {MISSPELT[name]!r}?"
    wrong: Any = {name: 5}
    with pytest.raises(TypeError) as error:
        client.infer("m", {"IN0": X}, **wrong)
    assert str(error.value) == f"there is no keyword argument {name!r}; {remedy}"


KEYWORDS_OF_CLIENTS = {
    "max_bytes": "say pool=PoolOptions(max_bytes=...)",
    "ssl": "begin the URL with grpcs:// or https://, and say tls=Tls(...) for certificates of your own",
    "network_timeout": "use timeout_s, in seconds",
    "timeout": (
        "expected some of cuda, inline_bytes, path, pool, timeout_s, tls, url, wait_ready_s; did you mean 'timeout_s'?"
    ),
}


@pytest.mark.parametrize("name", KEYWORDS_OF_CLIENTS)
@pytest.mark.parametrize("kind", [ShmClient, AsyncShmClient])
def test_a_keyword_that_no_client_is_made_with(kind: Callable[..., Any], name: str) -> None:
    with pytest.raises(TypeError) as error:
        kind("localhost:1", **{name: 5})
    assert str(error.value) == f"{kind.__name__}() has no keyword argument {name!r}; {KEYWORDS_OF_CLIENTS[name]}"


def test_a_batch_that_only_infer_can_split(client: ShmClient) -> None:
    wrong: Any = {"split": True}
    for method in (client.submit, client.prepare, client.stream):
        with pytest.raises(TypeError, match=r"^there is no keyword argument 'split'; only infer\(\) can split a b"):
            method("m", {"IN0": X}, **wrong)


def test_what_tritonclient_and_numpy_have_too_is_taken(client: ShmClient) -> None:
    more: Any = {"request_id": "7", "priority": 1, "headers": {"a": "b"}, "model_version": "1"}
    for timeout_s in (np.float32(5), np.float64(5), np.int64(5)):
        client.infer("m", {"IN0": X}, timeout_s=timeout_s, **more)
    PoolOptions(max_bytes=np.int64(2**30), stream_guess_bytes=np.uint32(0))


class InferRequestedOutput:
    """Named as tritonclient's."""


CALLS: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "inputs before the model": (
        lambda client: client.infer({"IN0": X}, "m"),
        CallerError,
        "model is of type dict; expected a str: the model's name comes first",
    ),
    "a list of inputs": (
        lambda client: client.infer("m", [X]),
        CallerError,
        "inputs is of type list; expected a mapping of input names to array, for example {'INPUT0': array}",
    ),
    "an input by its shape and dtype": (
        lambda client: client.infer("m", {"IN0": ((3,), "float32")}),
        TypeError,
        "input 'IN0' is an object of type tuple: shape and dtype, which prepare() takes; give the array itself",
    ),
    "an output by its shape alone": (
        lambda client: client.infer("m", {"IN0": X}, outputs={"OUT0": (3, 2)}),
        TensorError,
        "the hint for output 'OUT0' is (3, 2); expected bytes, 0 or more, or (shape, dtype), for example ((1, 3), "
        "'float32'), or a device such as 'cuda:0', or (shape, dtype, device), or None. An output is always in the "
        "client's memory, so an array cannot be a hint",
    ),
    "outputs of tritonclient": (
        lambda client: client.infer("m", {"IN0": X}, outputs=[InferRequestedOutput()]),
        CallerError,
        "outputs has an element of type InferRequestedOutput; expected names of outputs, as str",
    ),
    "an output like none": (
        lambda client: client.infer("m", {"IN0": X}, outputs=["probabilities"]),
        KeyError,
        "model 'm' has no output 'probabilities'; it has OUT0",
    ),
    "a name that is too long to be compared": (
        lambda client: client.infer("m", {"IN0": X}, outputs=["OUT0" + " " * 61]),
        KeyError,
        f"model 'm' has no output 'OUT0{' ' * 61}'; it has OUT0",
    ),
    "a parameter of NumPy": (
        lambda client: client.infer("m", {"IN0": X}, parameters={"times": np.int64(3)}),
        CallerError,
        f"parameter 'times' is {np.int64(3)!r}; expected a str, a bool, an int of 64 bits, or a float; write .item() "
        "for a number of NumPy",
    ),
    "as_numpy": (
        lambda client: client.infer("m", {"IN0": X}).as_numpy("OUT0"),
        AttributeError,
        "a Result has no attribute 'as_numpy'; read an output by its name: result['OUTPUT0']",
    ),
    "a Result's shape": (
        lambda client: client.infer("m", {"IN0": X}).shape,
        AttributeError,
        "a Result has no attribute 'shape'",
    ),
    "an output as an attribute": (
        lambda client: client.infer("m", {"IN0": X}).OUT0,
        AttributeError,
        "a Result has no attribute 'OUT0'; the output is result['OUT0']",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_wrong(client: ShmClient, what: str) -> None:
    call, kind, text = CALLS[what]
    with pytest.raises(kind) as error:
        call(client)
    assert str(error.value) == text
    assert error.value.__suppress_context__ or not isinstance(error.value.__context__, InferenceError)


@pytest.mark.parametrize("outputs", [["OUT"], {"OUT": 100}, ["out0"]])
def test_an_output_that_is_misspelt(client: ShmClient, outputs: Any, path: Any) -> None:
    with pytest.raises(KeyError) as error:
        client.infer("m", {"IN0": X}, outputs=outputs, path=path)
    assert str(error.value) == f"model 'm' has no output {next(iter(outputs))!r}; it has OUT0; did you mean 'OUT0'?"


def test_inputs_of_a_prepared_call_are_filled_and_not_replaced(client: ShmClient) -> None:
    with client.prepare("m", {"IN0": ((3,), np.float32)}) as call:
        inputs: Any = call.inputs
        with pytest.raises(TypeError, match="^input 'IN0' cannot be replaced, only filled; write "):
            inputs["IN0"] = X
        takes = r"^infer\(\) of a prepared call takes only timeout_s and cuda_stream; write call\.inputs"
        with pytest.raises(TypeError, match=takes):
            call.infer({"IN0": X})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=takes):
            call.infer(stream=0)  # type: ignore[arg-type]
        with pytest.raises(KeyError) as misspelt:
            inputs["in0"]
        assert misspelt.value.args == ("this call has no input 'in0'; it has IN0; did you mean 'IN0'?",)
        assert (list(inputs), len(inputs), "in0" in inputs) == (["IN0"], 1, False)
    with pytest.raises(ClosedError):
        call.inputs["IN0"]


@pytest.mark.parametrize("value", ["1G", 1e9, True, None])
@pytest.mark.parametrize("name", ["max_bytes", "max_device_bytes", "max_batch_bytes", "stream_guess_bytes"])
def test_a_budget_that_is_no_number_of_bytes(name: str, value: Any) -> None:
    wrong: Any = {name: value}
    if value is None and name in ("max_bytes", "max_device_bytes"):
        PoolOptions(**wrong)  # these two are found out
        return
    with pytest.raises(CallerError) as error:
        PoolOptions(**wrong)
    assert str(error.value) == f"PoolOptions.{name} is {value!r}; expected a whole number of bytes, such as 2**30"


VALUES: list[tuple[Callable[[Any], object], list[Any], type[Exception], str]] = [
    (split_url, [None, 8001, b"a:8001"], CallerError, "the URL is {}; expected a str, for example 'localhost:8001'"),
    (
        lambda pool: ClientMemory(None, pool, CudaAccess()),
        [2**30, {"max_bytes": 2**30}],
        CallerError,
        "pool is {}; expected PoolOptions(max_bytes=...)",
    ),
    (
        lambda dtype: described_inputs({"X": ((2, 3), dtype)}),
        ["FP32", "TYPE_FP32", "flaot32", "BYTES", 7],
        TensorTypeError,
        "tensor 'X' has dtype {}, which NumPy does not know; expected for example np.float32, or for strings 'S20'",
    ),
    (wanted_outputs, [3, np.float32(1), object], CallerError, "outputs is {}; expected a list of names, or a mapping"),
]


@pytest.mark.parametrize(
    ("take", "value", "kind", "text"), [(take, value, *told) for take, values, *told in VALUES for value in values]
)
def test_a_value_that_is_none(take: Callable[[Any], object], value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        take(value)
    assert str(error.value) == text.format(repr(value))


@pytest.mark.parametrize(
    "description", [np.ones((2, 3), np.float32), np.float32, (3,), (2, 3), [], 4, "FP32", ((3,), "f4", "cuda:0", 1)]
)
def test_a_prepared_input_that_is_not_described(description: Any) -> None:
    expected = r"expected \(shape, dtype\), for example \(\(1, 3\), 'float32'\)"
    with pytest.raises(TensorShapeError, match=f"^input 'X' is described by .*; {expected}"):
        described_inputs({"X": description})


@pytest.mark.parametrize("hint", [np.ones(1000), [np.ones(1000)], object(), 1.5, -1, "gpu", ((3,), "f4", object())])
def test_a_hint_that_is_none(hint: Any) -> None:
    """In one line, without elements and addresses: people give the array that they want filled."""
    with pytest.raises(TensorError, match="^the (hint for output|device of tensor) 'Y' is ") as error:
        wanted_outputs({"Y": hint})
    assert "\n" not in str(error.value)
    assert " at 0x" not in str(error.value)


@pytest.mark.parametrize("mode", [660, 0o400, 0o1600, "0660"])
def test_a_mode_that_is_no_octal_number_opens_nothing(mode: Any) -> None:
    with pytest.raises(CallerError, match="expected for example 0o600, or 0o660 with a group"):
        Access(mode=mode)


FOUR = np.arange(4, dtype=np.float32)
PATHS = {"SHM_PATHS": "direct,triton-shm,inline"}
SAYS = "but the model's configuration says"
TAKES = "shm:model: from_args takes the args of initialize unchanged: write ShmSession.from_args(args)"
WROTE = "shm:model: model.py wrote an invalid output: "


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters=PATHS) as session:
        yield session


def answered(session: ShmSession, infer: Callable[[Call], Any]) -> str:
    return error_of(session, delivered({}, ["Y"], {"X": FOUR}), infer)


MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a misspelt input": (
        lambda call: call.input("x"),
        "shm:model: model.py asked for input 'x'; the model has X; did you mean 'X'?",
    ),
    "a misspelt output": (
        lambda call: call.output("YY", (4,), np.float32),
        f"{WROTE}model 'm' has no output 'YY'; it has Y; did you mean 'Y'?",
    ),
    "another dtype": (
        lambda call: call.output("Y", (4,), np.float64),
        f"{WROTE}tensor 'Y' is FP64, {SAYS} TYPE_FP32; convert it by .astype('float32')",
    ),
    "another rank": (
        lambda call: call.output("Y", (4, 2), np.float32),
        f"{WROTE}tensor 'Y' has shape [4, 2], {SAYS} [-1] (-1 is any size)",
    ),
    "a size of -1": (
        lambda call: call.output("Y", (-1,), np.float32),
        f"{WROTE}tensor 'Y' has shape [-1]; expected sizes of 0 or more",
    ),
    "a shape that is a number": (
        lambda call: call.output("Y", 4, np.float32),
        f"shm:model: output 'Y' was asked for with shape 4 and dtype {np.float32!r} ('int' object is not "
        "iterable); expected values such as (1, 3) and np.float32",
    ),
    "a size that is a fraction": (
        lambda call: call.output("Y", (4.0,), np.float32),
        f"shm:model: output 'Y' was asked for with shape (4.0,) and dtype {np.float32!r} ('float' object cannot be "
        "interpreted as an integer); expected values such as (1, 3) and np.float32",
    ),
    "a dtype of Triton's": (
        lambda call: call.output("Y", (4,), "FP32"),
        "shm:model: output 'Y' was asked for with shape (4,) and dtype 'FP32' (data type 'FP32' not understood); "
        "expected values such as (1, 3) and np.float32",
    ),
    "outputs that are returned": (
        lambda call: {"Y": FOUR},
        "shm:model: output 'Y' was requested, but model.py wrote none; write it by call.put('Y', array) or "
        "call.output('Y', shape, dtype): the return value of a function is not sent",
    ),
    "a session of args": (
        lambda call: ShmSession(dict[str, Any]()),  # type: ignore[arg-type]
        "shm:model: ShmSession takes a ModelSpec; in initialize, write ShmSession.from_args(args)",
    ),
    "a session of the configuration": (lambda call: ShmSession.from_args({"name": "m"}), TAKES),
    "a session of the configuration's text": (lambda call: ShmSession.from_args('{"name": "m"}'), TAKES),  # type: ignore[arg-type]
    "strings that are none": (
        lambda call: call.input("X").strings(),
        "shm:tensor: tensor 'X' holds FP32, no strings; use .numpy()",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_model_py(session: ShmSession, what: str) -> None:
    infer, text = MODELS[what]
    assert answered(session, infer).splitlines()[0] == text


def test_strings_that_are_not_written_and_inputs_that_are(monkeypatch: pytest.MonkeyPatch, session: ShmSession) -> None:
    said = answered(session, lambda call: np.copyto(call.input("X").numpy(), 1))
    assert "ValueError: assignment destination is read-only" in said
    with session_of(monkeypatch, [tensor("X")], [tensor("Y", "STRING")], parameters=PATHS) as words:
        assert answered(words, lambda call: None) == (
            "shm:model: output 'Y' was requested, but model.py wrote none; write it by call.put('Y', strings): the "
            "return value of a function is not sent"
        )


def frames(call: Call) -> Iterator[None]:
    call.put("Y", FOUR)
    yield


async def later(call: Call) -> None:
    call.put("Y", FOUR)


BATCHED = [tensor("X", dims=(3,)), {**tensor("SHM", "UINT8"), "optional": True}]


@pytest.mark.parametrize(
    ("infer", "text"),
    [
        (frames, "shm:model: the function yields, so its body did not run; pass generator functions to serve_streams"),
        (later, "shm:model: the function is async, so its body did not run; pass async functions to serve_async"),
    ],
)
def test_a_function_of_another_mode(
    session: ShmSession, monkeypatch: pytest.MonkeyPatch, infer: Any, text: str
) -> None:
    assert answered(session, infer) == text
    with session_of(monkeypatch, BATCHED, [tensor("Y", dims=(3,))], max_batch_size=4, parameters=PATHS) as batches:
        (response,) = batches.serve_batch([delivered({}, ["Y"], {"X": np.ones((1, 3), np.float32)})], infer)
    assert message_of(response) == text
