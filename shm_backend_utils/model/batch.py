"""Several requests as one batch: one array over all their rows, in the clients' own memory where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..tensors.view import TensorView
from .call import Call
from .gathering import Gathering
from .joining import joined

__all__ = ["BatchCall"]


class BatchCall:
    """The requests of one ``execute`` that have the same inputs, but for their rows.

    Attributes
    ----------
    calls : tuple of Call
        One for each request: its parameters, what it wants, and more.
    rows : tuple of range
        Which rows are whose, in the same order.
    size : int
        How many rows there are.
    """

    def __init__(self, calls: Sequence[Call], gathering: Gathering) -> None:
        self.calls = tuple(calls)
        self.rows = _rows([call.batch_size for call in calls])
        self.size = self.rows[-1].stop
        self._gathering = gathering
        self._inputs: dict[str, TensorView] = {}
        self._scattered: dict[str, tuple[TensorView, list[TensorView]]] = {}

    @property
    def gathered_bytes(self) -> int:
        """Bytes that were copied so far to make one array of several, or several of one."""
        return self._gathering.byte_count

    def input(self, name: str) -> TensorView:
        """Return one input of all requests: a view, C-contiguous and read-only.

        It is the clients' memory, without any copy, where the rows follow one another there; else they are copied to a
        buffer, once, which the next ``execute`` uses again.

        Raises
        ------
        MissingTensorError
            The requests do not have it.
        """
        found = self._inputs.get(name)
        if found is None:
            found = self._inputs[name] = self._whole([call.input(name) for call in self.calls])
        return found

    def output(self, name: str, item_shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output of all requests, ``item_shape`` being that of a row.

        It is the clients' own where that is contiguous; else it is copied there when the batch ends.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        kind = np.dtype(dtype)
        parts = [
            call.output(name, (len(rows), *item_shape), kind) for call, rows in zip(self.calls, self.rows, strict=True)
        ]
        whole = joined(self.calls[0].direct_plan, parts, writable=True)
        if whole is None:
            whole = self._gathering.room(parts, (self.size, *item_shape))
            self._scattered[name] = whole, parts
        return whole

    def put(self, name: str, array: Any) -> None:
        """Give one output of all requests: an array whose first dimension has all rows.

        Raises
        ------
        ModelError
            As for :meth:`output`; or there are more rows, or fewer.
        """
        value = array.array if isinstance(array, TensorView) else array
        if not hasattr(value, "__dlpack_device__"):
            value = np.asarray(value)
        if not value.shape or value.shape[0] != self.size:
            raise ModelError(f"output {name!r} has shape {list(value.shape)}, but the batch has {self.size} rows")
        for call, rows in zip(self.calls, self.rows, strict=True):
            call.put(name, value[rows.start : rows.stop])

    def requested(self, name: str) -> bool:
        """Return whether any client wants this output. Others need not be computed."""
        return any(call.requested(name) for call in self.calls)

    def commit(self) -> None:
        """Copy outputs that are not where they belong. Only :class:`ShmSession` calls this."""
        for whole, parts in self._scattered.values():
            self._gathering.scatter(whole, parts)

    def _whole(self, parts: list[TensorView]) -> TensorView:
        whole = joined(self.calls[0].direct_plan, parts, writable=False)
        return self._gathering.gather(parts, self.size) if whole is None else whole


def _rows(sizes: Sequence[int]) -> tuple[range, ...]:
    rows, begin = [], 0
    for size in sizes:
        rows.append(range(begin, begin + size))
        begin += size
    return tuple(rows)
