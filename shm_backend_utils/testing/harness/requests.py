"""Requests, and the objects that get their responses."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from ...dtypes import BYTES, from_numpy
from ...model_spec import output_names
from ...tensors.strings import Strings
from ...tensors.values import untyped_array
from ..emulator import TensorContent

__all__ = ["CANCELLED", "Answer", "Input", "Outcome", "Request", "ServerError", "of_arrays"]

CANCELLED: Final = "CANCELLED"
"""Triton's code of a request whose client has stopped waiting."""
_NO_ANSWER: Final = (
    "model '{}' has dropped the request without an answer: a server would never answer it, and its client would wait "
    "until its deadline; return an InferenceResponse for it, or send one with its response sender, the last with "
    "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
)


class ServerError(Exception):
    """The emulated server's refusal of a request, or its failure: a text, and Triton's code, as ``"INVALID_ARG"``."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Input(NamedTuple):
    """An input as a request has it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Any  # bytes as they travel, unless the caller had an array


@dataclass(slots=True)
class Request:
    """One request."""

    inputs: Mapping[str, Any]  # values are arrays, or Input if it was read from a message
    outputs: Sequence[str] | None = None  # those that are wanted; all, if not given
    # of str to str, int, bool or float
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)
    request_id: str = ""
    sequence_id: int | str = 0  # 0 for none
    flags: int = 0  # 1 for the first of its sequence, 2 for the last
    timeout_us: int = 0
    priority: int = 0
    model: str = ""  # empty for the harness' first model, and for the version that it serves
    version: str = ""


class Outcome(NamedTuple):
    """One response."""

    outputs: list[TensorContent]
    error: tuple[str, str] | None  # message and code
    is_final: bool  # no more come
    is_empty: bool = False  # it only ends the stream
    parameters: str = ""  # as JSON; empty for none


def of_arrays(request: Request) -> Request:
    """Return a request whose inputs are arrays, or values that NumPy makes arrays of, as the server has it."""
    names = None if request.outputs is None else output_names(request.outputs)
    inputs = {name: _input(name, value) for name, value in request.inputs.items()}
    return replace(request, inputs=inputs, outputs=names)


def _input(name: str, value: Any) -> Input:
    array = untyped_array(name, value)
    dtype = from_numpy(array.dtype, name)
    if dtype is BYTES:
        array = Strings.of(name, array).numpy()
    return Input(name, dtype.name, array.shape, array)


class Answer:
    """The responses to one request, as they come; ``restored`` turns a model's output into the server's."""

    def __init__(self, model: str, restored: Callable[[TensorContent], TensorContent]) -> None:
        self._model = model
        self._restored = restored
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._is_cancelled = False
        self._on_cancel: Callable[[], object] | None = None
        self.is_over = False

    def put(self, outcome: Outcome) -> None:
        """Take a response; drop it if the last one has come."""
        if self.is_over:
            return
        self.is_over = outcome.is_final
        self._outcomes.put(outcome._replace(outputs=list(map(self._restored, outcome.outputs))))

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """Take an error as the last response."""
        self.put(Outcome([], (message, code), is_final=True))

    def let_go(self) -> None:
        """Note that no model can answer any more."""
        self.fail(_NO_ANSWER.format(self._model))

    def outcomes(self, timeout_s: float | None = None) -> Iterator[Outcome]:
        """Return the responses as they come, the last one too; TimeoutError if none came in this time."""
        while True:
            try:
                outcome = self._outcomes.get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError from None
            yield outcome
            if outcome.is_final:
                return

    def only(self, timeout_s: float | None = None) -> Outcome:
        """Return the one response of a model that is not decoupled; TimeoutError if the last has not come in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: Outcome | None = None
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            try:
                outcome = self._outcomes.get(timeout=left)
            except queue.Empty:
                raise TimeoutError from None
            if found is None or not outcome.is_empty:
                found = outcome
            if outcome.is_final:
                return found

    def cancel(self) -> None:
        """Note that no client waits any more, and call the callback."""
        if self.is_over:
            return
        self._is_cancelled = True
        self.fail(f"the request to model {self._model!r} was cancelled", CANCELLED)
        if self._on_cancel is not None:
            self._on_cancel()

    def is_cancelled(self) -> bool:
        """Return whether no client waits any more."""
        return self._is_cancelled

    def when_cancelled(self, tell: Callable[[], object]) -> None:
        """Set the callback of a cancellation."""
        self._on_cancel = tell
        if self._is_cancelled:
            tell()
