"""Tensors travel with the request and its response: for clients anywhere, and data types of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import TensorError
from ...model_spec import ModelSpec
from ...protocol.answers import missing_output
from ...protocol.call_layout import CallLayout
from ...tensors.strings import Strings
from ..inputs.sources import Source, StringSource
from ..options import RequestOptions
from ..result import Result
from ..steps import Send, Steps
from ..transports.messages import Codec, InputTensor, Request
from .exchange import Exchange, checked_output, requested_outputs

__all__ = ["InlineExchange", "in_band", "no_strings", "source_of"]

_MOST_BYTES: Final = 2**31 - 2**20
"""Of inputs in a message: protobuf counts in 31 bits, and their names, shapes and the like need some room."""


class InlineExchange(Exchange):
    """A call whose tensors are in the message."""

    path = "inline"

    def __init__(self, codec: Codec, spec: ModelSpec, layout: CallLayout, options: RequestOptions) -> None:
        self.spec, self.layout, self.options = spec, layout, options
        byte_size = sum(span.byte_size for span in layout.table.inputs.values())
        if byte_size > _MOST_BYTES:
            raise TensorError(
                next(iter(layout.table.inputs)),
                f"the inputs of model {spec.name!r} take {byte_size:,} bytes, and a message carries less than 2 GiB: "
                "make several calls, or open path direct or triton-shm: client.explain(model) says why they are closed",
            )
        self._codec = codec
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: np.empty(span.shape, span.dtype.numpy) for name, span in layout.table.inputs.items()
        } | no_strings(layout)

    def arrays(self) -> dict[str, Any]:
        return dict(self._arrays)

    def write(self, given: Mapping[str, Source]) -> None:
        arrays = self._arrays  # those that there are, if the exchange is closed while another thread copies
        if self.is_closed:
            return
        for name, source in given.items():
            source.write_to(arrays[name])

    def sources(self) -> dict[str, Source]:
        return {name: source_of(name, array) for name, array in self._arrays.items()}

    def message(self) -> Any:
        """Return the message of a request for what lies in the inputs now."""
        inputs = [in_band(name, array, self.layout) for name, array in self._arrays.items()]
        return self._codec.infer(Request(self.spec.name, inputs, requested_outputs(self.layout), self.options))

    def result(self, answer: Any) -> Result:
        """Return a response's outputs; those that it does not have are left out."""
        response = self._codec.result(answer)
        wanted = self.spec.outputs if self.layout.requested is None else self.layout.requested
        arrays = {name: checked_output(self._codec, response, self.spec, name) for name in wanted}
        found = {name: array for name, array in arrays.items() if array is not None}
        return Result(found, self.path, lambda: response, in_response=tuple(found))

    def send(self, timeout_s: float) -> Steps[Result]:
        self._check_is_open()
        result = self.result((yield Send(self.message(), timeout_s)))
        for name in self.spec.outputs if self.layout.requested is None else self.layout.requested:
            if name not in result:
                raise missing_output(self.spec.name, name)
        return result

    def close(self) -> None:
        super().close()
        self._arrays = {}


def in_band(name: str, array: npt.NDArray[Any], layout: CallLayout) -> InputTensor:
    """Return an input that travels with the request."""
    dtype = layout.table.inputs[name].dtype
    if dtype is BYTES:
        array = Strings.of(name, array).numpy()  # tritonclient would send whatever else as it prints
    return InputTensor(name, dtype.name, array.shape, array)


def no_strings(layout: CallLayout) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of empty strings for the inputs that are strings, for the user to fill."""
    spans = layout.table.inputs
    return {name: np.full(span.shape, b"", object) for name, span in spans.items() if span.dtype is BYTES}


def source_of(name: str, array: npt.NDArray[Any]) -> Source:
    """Return an array on the host, of objects if it holds strings, as a source."""
    source = Source.of(name, array)
    return StringSource(name, source) if source.dtype is BYTES else source
