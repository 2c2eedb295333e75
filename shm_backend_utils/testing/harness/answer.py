"""Where the responses to one request arrive, and where whoever asked waits for them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Final

from ..emulator import TensorContent
from .requests import Outcome

__all__ = ["CANCELLED", "Answer"]

CANCELLED: Final = "CANCELLED"
"""Triton's code of a request that nobody waits for any more."""
_FORSAKEN: Final = (
    "model '{}' has let go of the request without an answer: a server would never answer it, and its client would wait "
    "until its deadline; return an InferenceResponse for it, or send one by its response sender, the last with "
    "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
)


class Answer:
    """The responses to one request, as they come.

    ``restored`` takes an output as the model gave it, and returns it as the server sends it; ``model`` is for messages.
    """

    def __init__(self, model: str, restored: Callable[[TensorContent], TensorContent]) -> None:
        self._model = model
        self._restored = restored
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._is_cancelled = False
        self._on_cancel: Callable[[], object] | None = None
        self.is_over = False

    def put(self, outcome: Outcome) -> None:
        """Take a response; whatever comes after the last one is dropped."""
        if self.is_over:
            return
        self.is_over = outcome.is_final
        self._outcomes.put(outcome._replace(outputs=list(map(self._restored, outcome.outputs))))

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """Take an error as the last response."""
        self.put(Outcome([], (message, code), is_final=True))

    def forsake(self) -> None:
        """Take it that nobody can answer any more."""
        self.fail(_FORSAKEN.format(self._model))

    def outcomes(self, patience_s: float | None = None) -> Iterator[Outcome]:
        """Return the responses as they come, the last one too; TimeoutError if none came in this time."""
        while True:
            try:
                outcome = self._outcomes.get(timeout=patience_s)
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
        """Say that nobody waits any more; whoever still does is told."""
        if self.is_over:
            return
        self._is_cancelled = True
        self.fail(f"the request to model {self._model!r} was cancelled", CANCELLED)
        if self._on_cancel is not None:
            self._on_cancel()

    def is_cancelled(self) -> bool:
        """Return whether nobody waits any more."""
        return self._is_cancelled

    def when_cancelled(self, tell: Callable[[], object]) -> None:
        """Have somebody told, who is somewhere else."""
        self._on_cancel = tell
        if self._is_cancelled:
            tell()
