"""A request as Triton delivers it: its tensors, and what it says beside them. Nothing is asked for before it is due."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import BYTES
from ..model_spec import BATCH_CARRIER, ModelSpec
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .device_arrays import DeviceArrays
from .triton import TritonBackend

__all__ = ["TRITON", "Incoming", "SequencePart"]

TRITON: Final = "triton"
"""The path of tensors that Triton delivers, be it from its own shared memory or from the request."""

_START: Final = 1  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END: Final = 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class SequencePart(NamedTuple):
    """The sequence that a request is part of.

    Attributes
    ----------
    correlation_id : int or str
        As the client chose it.
    is_start, is_end : bool
        Whether the request is the sequence's first, or its last.
    """

    correlation_id: int | str
    is_start: bool
    is_end: bool


class Incoming:
    """One request."""

    __slots__ = ("_arrays", "_arrived", "_backend", "_request", "_requested", "_spec", "_tensors")

    def __init__(self, request: Any, spec: ModelSpec, backend: TritonBackend, arrays: DeviceArrays) -> None:
        self._request = request
        self._spec = spec
        self._backend = backend
        self._arrays = arrays
        self._arrived = time.monotonic()
        self._tensors: dict[str, Any] | None = None
        self._requested: Collection[str] | None = None

    @property
    def text(self) -> str:
        """The parameters: a JSON object, or nothing."""
        return self._backend.parameters(self._request)

    @property
    def tensors(self) -> dict[str, Any]:
        """What came with the request, by name, as the Python backend's tensors."""
        if self._tensors is None:
            self._tensors = {tensor.name(): tensor for tensor in self._request.inputs()}
        return self._tensors

    @property
    def requested(self) -> Collection[str]:
        """The outputs that the client wants."""
        if self._requested is None:
            self._requested = self._request.requested_output_names()
        return self._requested

    @property
    def carried_batch_size(self) -> int | None:
        """What the batch carrier says; None if there is none."""
        carrier = self.tensors.get(BATCH_CARRIER)
        return None if carrier is None else int(carrier.shape()[0])

    @property
    def is_cancelled(self) -> bool:
        """Whether the client does not want the answer any more. Asks the server."""
        return bool(self._request.is_cancelled())

    @property
    def request_id(self) -> str:
        """As the client chose it; empty if it did not."""
        return str(self._request.request_id())

    @property
    def sequence(self) -> SequencePart | None:
        """The sequence that it is part of; None if it is none."""
        correlation_id: int | str = self._request.correlation_id()
        if not correlation_id:
            return None
        flags = self._request.flags()
        return SequencePart(correlation_id, bool(flags & _START), bool(flags & _END))

    @property
    def deadline(self) -> float | None:
        """When the client's ``timeout`` is over, by ``time.monotonic()``; None if it has set none.

        Counted from when the model got the request: how long it waited before, the server does not tell.
        """
        timeout_us = self._request.timeout()
        return self._arrived + timeout_us * 1e-6 if timeout_us else None

    def view(self, name: str) -> TensorView | None:
        """Return an input that came with the request, read-only; None if it did not."""
        tensor = self.tensors.get(name)
        if tensor is None or name == BATCH_CARRIER:
            return None
        if not tensor.is_cpu():
            return self._device_view(name, tensor)
        spec = self._spec.inputs.get(name)
        array = self._backend.input(tensor, None if spec is None else spec.dtype).view()
        if array.dtype == BYTES.numpy:
            return StringsView(name, Strings.of(name, array), TRITON)
        array.flags.writeable = False
        return TensorView(name, array, dtypes.from_numpy(array.dtype, name), TRITON)

    def _device_view(self, name: str, tensor: Any) -> TensorView:
        array = self._arrays.adopt(tensor.to_dlpack())
        dtype = dtypes.from_numpy(np.dtype(array.dtype), name)
        return self._arrays.view(name, array, dtype, TRITON, writable=False)
