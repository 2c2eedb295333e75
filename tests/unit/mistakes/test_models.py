"""What authors of models get wrong at first: in config.pbtxt, and in model.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import delivered, error_of, message_of
from tests.unit.sessions import session_of, tensor

X = np.arange(4, dtype=np.float32)
PATHS = {"SHM_PATHS": "direct,triton-shm,inline"}
SAYS = "but the model's configuration says"
TAKES = "shm:model: from_args takes what initialize gets, as it is: ShmSession.from_args(args)"
WROTE = "shm:model: model.py wrote an output that it may not: "


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters=PATHS) as session:
        yield session


def answered(session: ShmSession, infer: Callable[[Call], Any]) -> str:
    return error_of(session, delivered({}, ["Y"], {"X": X}), infer)


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
        "iterable); expected for example (1, 3) and np.float32",
    ),
    "a size that is a fraction": (
        lambda call: call.output("Y", (4.0,), np.float32),
        f"shm:model: output 'Y' was asked for with shape (4.0,) and dtype {np.float32!r} ('float' object cannot be "
        "interpreted as an integer); expected for example (1, 3) and np.float32",
    ),
    "a dtype of Triton's": (
        lambda call: call.output("Y", (4,), "FP32"),
        "shm:model: output 'Y' was asked for with shape (4,) and dtype 'FP32' (data type 'FP32' not understood); "
        "expected for example (1, 3) and np.float32",
    ),
    "outputs that are returned": (
        lambda call: {"Y": X},
        "shm:model: output 'Y' was requested, but model.py wrote none; write it by call.put('Y', array) or "
        "call.output('Y', shape, dtype): what a function returns is not sent",
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


def test_strings_that_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y", "STRING")], parameters=PATHS) as session:
        assert answered(session, lambda call: None) == (
            "shm:model: output 'Y' was requested, but model.py wrote none; write it by call.put('Y', strings): what a "
            "function returns is not sent"
        )


def frames(call: Call) -> Iterator[None]:
    call.put("Y", X)
    yield


async def later(call: Call) -> None:
    call.put("Y", X)


BATCHED = [tensor("X", dims=(3,)), {**tensor("SHM", "UINT8"), "optional": True}]


@pytest.mark.parametrize(
    ("infer", "text"),
    [
        (frames, "shm:model: the function yields, so nothing of it ran; generators are for serve_streams"),
        (later, "shm:model: the function is async, so nothing of it ran; async functions are for serve_async"),
    ],
)
def test_a_function_of_another_mode(
    session: ShmSession, monkeypatch: pytest.MonkeyPatch, infer: Callable[[Any], Any], text: str
) -> None:
    assert answered(session, infer) == text
    with session_of(monkeypatch, BATCHED, [tensor("Y", dims=(3,))], max_batch_size=4, parameters=PATHS) as batches:
        (response,) = batches.serve_batch([delivered({}, ["Y"], {"X": np.ones((1, 3), np.float32)})], infer)
    assert message_of(response) == text


def test_an_input_that_is_written_to(session: ShmSession) -> None:
    def write(call: Call) -> None:
        call.input("X").numpy()[0] = 1

    said = answered(session, write)
    assert "ValueError: assignment destination is read-only" in said
