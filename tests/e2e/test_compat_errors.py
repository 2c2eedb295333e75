"""What the original raises, the class that replaces it raises too; where it does worse, there is a clear error."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import DeadlineExceededError, ServerUnavailableError
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.errors import BatchSizeError, TensorError, TensorTypeError
from shm_backend_utils.server import EmbeddedServer, Ports

from .two_classes import CLASSES, LATE_WRITER, ORDINARY, ROWS, Call, Declared, x_of

each_class = pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())


def rows(x: Any, **named: Any) -> Call:
    return Call(ROWS, {"X": x}, named)


def with_input(name: str, shape: Any, dtype: Any) -> Call:
    return Call(ROWS.but(inputs=[(name, shape, dtype)]), {name: np.ones((2, *shape))})


BAD_DECLARATIONS: dict[str, tuple[Declared, type[Exception]]] = {
    "no rows": (ROWS.but(max_batch_size=0), ValueError),
    "half a row": (ROWS.but(max_batch_size=1.5), TypeError),
    "no requests": (ROWS.but(pool_size=0), ValueError),
    "an input of nothing": (ROWS.but(inputs=[("X", (4, 0), np.float32)]), ValueError),
    "a number for a shape": (ROWS.but(inputs=[("X", 4, np.float32)]), TypeError),
    "no dtype": (ROWS.but(inputs=[("X", (4,))]), ValueError),
    "a dtype that there is not": (ROWS.but(inputs=[("X", (4,), "nonsense")]), TypeError),
}
STRINGS = "strings have no fixed size; use ShmClient for them"
TAKEN_BY_THE_ORIGINAL: dict[str, tuple[Declared, type[Exception], str]] = {
    "an input of objects": (ROWS.but(inputs=[("X", (4,), object)]), TensorTypeError, STRINGS),
    "an input of bytes": (ROWS.but(inputs=[("X", (4,), "S4")]), TensorTypeError, STRINGS),
    "an output of objects": (ROWS.reading(("DOUBLED", (4,), object)), TensorTypeError, STRINGS),
    "an output of bytes": (ROWS.reading(("DOUBLED", (4,), "S")), TensorTypeError, STRINGS),
    "an input twice": (ROWS.but(inputs=ROWS.inputs * 2), ValueError, "is declared twice"),
    "an output twice": (ROWS.but(outputs=ROWS.outputs * 2), ValueError, "is declared twice"),
}


def test_bad_declarations(triton_server: EmbeddedServer) -> None:
    for kind in CLASSES.values():
        with kind(triton_server.grpc_url) as client:
            for what, (declared, error) in BAD_DECLARATIONS.items():
                with pytest.raises(error):
                    declared.register(client)
                assert client.registered_models == {}, what
    with TritonSHMClient(triton_server.grpc_url) as client:
        for declared, error, said in TAKEN_BY_THE_ORIGINAL.values():  # which dies of it
            with pytest.raises(error, match=said):
                declared.register(client)


BAD_CALLS = {
    "no inputs": (Call(ROWS, {}), ValueError),
    "different numbers of rows": (Call(ORDINARY, {"X": x_of(3), "N": np.ones((2, 1))}), ValueError),
    "an input that was not declared": (Call(ROWS, {"Z": x_of(2)}), KeyError),
    "a tuple": (rows(tuple(x_of(2))), TypeError),
    "a string": (rows("abcd"), TypeError),
    "strings that are no numbers": (rows([["a", "b", "c", "d"]]), ValueError),
    "another dtype than the model's": (with_input("X", (4,), np.float64), RuntimeError),
    "another shape than the model's": (with_input("X", (3,), np.float32), RuntimeError),
    "an input that the model has not": (with_input("Z", (4,), np.float32), RuntimeError),
    "an output that the model has not": (Call(ROWS.reading(("Z", (4,), np.float32)), {"X": x_of(2)}), RuntimeError),
    "a batch larger than the model's": (Call(ROWS.but(max_batch_size=5), {"X": x_of(5)}), RuntimeError),
    "a model that there is not": (Call(ROWS.but(model="nowhere"), {"X": x_of(2)}), RuntimeError),
    "a version that there is not": (rows(x_of(2), model_version="7"), RuntimeError),
    "an ordinary model that fails": (Call(ORDINARY, {"X": -x_of(2) - 1, "N": np.ones((2, 1))}), RuntimeError),
    "a time that is no number": (rows(x_of(2), client_timeout=[]), TypeError),
    "a version as a number": (rows(x_of(2), model_version=1), InferenceServerException),
    "a request's name as a number": (rows(x_of(2), request_id=5), TypeError),
    "a priority that is no number": (rows(x_of(2), priority="high"), TypeError),
    "a parameter that cannot be sent": (rows(x_of(2), parameters={"a": [1]}), InferenceServerException),
    "a header that is no string": (rows(x_of(2), headers={"a": 5}), TypeError),
}


@each_class
@pytest.mark.parametrize(("call", "error"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_call_that_fails(triton_server: EmbeddedServer, kind: Any, call: Call, error: type[Exception]) -> None:
    with pytest.raises(error):
        call.made_by(kind, triton_server)


@each_class
def test_a_model_is_registered_before_it_is_called_and_once(
    triton_server: EmbeddedServer, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with kind(triton_server.grpc_url) as client:
        with pytest.raises(ValueError, match="rows.* is not registered"):
            client.infer_shm("rows", {"X": x_of(1)})
        ROWS.register(client)
        with pytest.raises(ValueError, match="rows.* is (already registered|registered already)"):
            ROWS.register(client)
        client.unregister_shm_model("rows")
        with pytest.raises(ValueError, match="rows.* is not registered"):
            client.infer_shm("rows", {"X": x_of(1)})
        ROWS.register(client)
        np.testing.assert_array_equal(client.infer_shm("rows", {"X": x_of(1)})["DOUBLED"], x_of(1) * 2)
        nothings: list[Any] = [[], (), np.empty(0), np.empty((0, 3)), ""]
        for nothing in nothings:
            assert all(array.size == 0 for array in client.infer_shm("rows", {"X": nothing}).values())
        client.unregister_shm_model("nowhere")
        assert "nowhere" in caplog.text


@each_class
def test_registering_needs_a_server(kind: Any) -> None:
    with kind(f"127.0.0.1:{Ports().resolve().grpc}") as client, pytest.raises(InferenceServerException) as caught:
        ROWS.register(client)
    assert kind is not TritonSHMClient or isinstance(caught.value, ServerUnavailableError)


LATE = Call(LATE_WRITER, {"VALUE_AND_DELAY_US": [1, 300_000]}, {"client_timeout": 0.02})


@pytest.mark.parametrize(
    ("call", "cause", "said"),
    [
        (LATE, DeadlineExceededError, "deadline"),
        (Call(ROWS.but(max_batch_size=5), {"X": x_of(5)}), BatchSizeError, "batch"),
        (with_input("X", (4,), np.float64), TensorTypeError, "FP32"),
        # The original sends what was in the memory before.
        (Call(ORDINARY, {"X": x_of(4)}), TensorError, "model 'ordinary' needs input 'N'"),
    ],
    ids=["deadline", "batch", "dtype", "missing"],
)
def test_a_failures_cause_tells_its_kind(
    triton_server: EmbeddedServer, call: Call, cause: type[Exception], said: str
) -> None:
    with pytest.raises(InferShmError, match=said) as caught:
        call.made_by(TritonSHMClient, triton_server)
    assert isinstance(caught.value.__cause__, cause)


@contextlib.contextmanager
def client_of(server: EmbeddedServer, declared: Declared) -> Iterator[TritonSHMClient]:
    with TritonSHMClient(server.grpc_url) as client:
        declared.register(client)
        yield client


@pytest.mark.parametrize("declared", [ROWS, ORDINARY], ids=lambda declared: declared.model)
def test_a_row_that_fails_fails_the_call(triton_server: EmbeddedServer, declared: Declared) -> None:
    x = x_of(19)
    inputs: dict[str, Any] = {"X": x, "N": np.ones((19, 1))} if declared is ORDINARY else {"X": x}
    with client_of(triton_server, declared) as client:
        for failing_row in (0, 9, 18):
            x[failing_row] = -1
            with pytest.raises(RuntimeError, match="a row begins below zero"):
                client.infer_shm(declared.model, inputs)
            x[failing_row] = 1
            assert len(client.infer_shm(declared.model, inputs)) == len(declared.outputs)


def test_what_fits_in_no_batch_but_the_first_is_refused_before_anything_is_sent(triton_server: EmbeddedServer) -> None:
    """The original sends what fits, and leaves those requests to themselves when it raises."""
    runs = ROWS.reading(("RUNS", (1,), np.int64))
    with client_of(triton_server, runs) as client:
        before = client.infer_shm("rows", {"X": x_of(1)})["RUNS"].item()
        for x in (np.ones(7, np.float32), np.ones((5, 1, 4), np.float32), [*x_of(4), np.ones(3)]):
            with pytest.raises(ValueError, match="does not fit the registered shape"):
                client.infer_shm("rows", {"X": x})
        assert client.infer_shm("rows", {"X": x_of(1)})["RUNS"].item() == before + 1


FAILING = {
    "values that cannot be cast": rows([["a", "b", "c", "d"]]),
    "an ordinary model that fails": Call(ORDINARY, {"X": -x_of(9) - 1, "N": np.ones((9, 1))}),
    "an output that is larger": Call(ROWS.reading(("DOUBLED", (3,), np.float32)), {"X": x_of(9)}),
    "a header that is no string": rows(x_of(9), headers={"a": 5}),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=FAILING.keys())
def test_failures_that_are_kept_keep_no_memory(triton_server: EmbeddedServer, call: Call) -> None:
    """If one did, there would be none left for the next calls, which would fail of that."""
    kept: list[BaseException] = []
    gc.disable()
    try:
        with client_of(triton_server, call.declared) as client:
            for _ in range(2 * call.declared.pool_size):
                with pytest.raises(Exception) as caught:  # noqa: PT011  # each raises what the first one does
                    client.infer_shm(call.declared.model, call.inputs, client_timeout=5, **call.named)
                kept.append(caught.value)
    finally:
        gc.enable()
    assert len({str(error) for error in kept}) == 1


def test_an_output_that_is_smaller_than_declared_is_followed_by_zeros(triton_server: EmbeddedServer) -> None:
    """The original's is followed by what was in the memory before, and its rows are not in place."""
    x = x_of(4) + 1
    with client_of(triton_server, ROWS.reading(("DOUBLED", (6,), np.float32)).but(pool_size=1)) as client:
        client.infer_shm("rows", {"X": x})  # uses the memory up
        doubled = client.infer_shm("rows", {"X": x[:2]})["DOUBLED"]
    np.testing.assert_array_equal(doubled, np.pad(x[:2] * 2, ((0, 0), (0, 2))))
