"""A call that counts what it does. Sessions without metrics make plain calls, and pay nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

from ..dtypes import BYTES
from ..protocol.results import Event
from .call import Call
from .metrics import Metrics

__all__ = ["MeasuredCall"]


class MeasuredCall(Call):
    """A call of a session with metrics.

    Its own time is that of entering and leaving it, without the model's code, and without what :class:`Completion`
    waits for.

    Parameters
    ----------
    metrics : Metrics
        Are told.
    arguments
        Those of :class:`Call`.
    """

    __slots__ = ("_metrics", "_own_s")

    def __init__(self, metrics: Metrics, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics = metrics
        self._own_s = 0.0

    def __enter__(self) -> MeasuredCall:
        begin = perf_counter()
        try:
            super().__enter__()
        except Exception as error:
            self._metrics.refused(error)
            raise
        self._own_s = perf_counter() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begin = perf_counter()
        try:
            super().__exit__(kind, error, trace)
        except Exception as refusal:
            self._metrics.refused(refusal)
            raise
        if error is None:
            self._metrics.took(self._own_s + perf_counter() - begin)
        else:
            self._metrics.refused(error)

    def end(self, events: Sequence[Event] = ()) -> None:
        """End the call, and count it."""
        super().end(events)
        self._metrics.answered(self.path, *self._bytes())

    def end_by(self, error: Exception) -> None:
        """Fail the call, and count it."""
        super().end_by(error)
        self._metrics.refused(error)

    def _bytes(self) -> tuple[int, int]:
        """Return how many bytes of tensors were not copied, and how many were.

        What Triton delivers has been copied, but for memory of a GPU. Strings that it delivers do not count: to know
        their size would take as long as to decode them.
        """
        zero_copy = copied = 0
        if self._direct is not None:
            zero_copy += sum(view.attributes.byte_size for view in self._direct.plan.inputs.values())
        for name, tensor in self._incoming.tensors.items():
            dtype = self._spec.inputs[name].dtype if name in self._spec.inputs else None
            if dtype is not None and dtype is not BYTES:
                size = math.prod(tensor.shape()) * dtype.itemsize
                copied += size if tensor.is_cpu() else 0
                zero_copy += 0 if tensor.is_cpu() else size
        assert self._outputs is not None
        for output in self._outputs.finished:
            size = output.view.attributes.byte_size
            if not output.is_delivered or output.name in self._outputs.copied:
                copied += size
            else:
                zero_copy += size
        return zero_copy, copied
