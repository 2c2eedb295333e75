"""Tensors travel with the request and its response: for clients anywhere, and data types of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import ClosedError
from ...protocol.answers import missing_output
from ...protocol.call_layout import CallLayout
from ...tensors.strings import Strings
from ..inputs.sources import SAME_VALUES, Source, StringSource
from ..result import Result
from ..steps import Send, Steps
from ..transports.messages import InputTensor
from .call import Call, checked_output

__all__ = ["InlineCall", "in_band", "no_strings", "source_of"]


@dataclass(eq=False, repr=False)
class InlineCall(Call):
    """A call whose tensors are in the message."""

    path = "inline"

    _arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict, init=False)

    def arrays(self) -> dict[str, Any]:
        empty = {name: np.empty(each.shape, each.dtype.numpy) for name, each in self.layout.table.inputs.items()}
        self._arrays = empty | no_strings(self.layout) | self._arrays
        return dict(self._arrays)

    def write(self, given: Mapping[str, Source]) -> None:
        if self.is_closed:
            return
        for name, source in given.items():
            array = self._arrays[name] = np.empty(source.shape, source.dtype.numpy)
            if len(source.parts) == 1:  # nearly always
                np.copyto(array, source.parts[0], casting=SAME_VALUES)
            else:
                source.write_to(array)

    def sources(self) -> dict[str, Source]:
        return {name: source_of(name, array) for name, array in self._arrays.items()}

    def message(self) -> Any:
        """Return the message of a request for what lies in the inputs now."""
        layout, spans = self.layout, self.layout.table.inputs
        inputs = [
            in_band(name, array, layout)
            if spans[name].dtype is BYTES
            else InputTensor(name, spans[name].dtype.name, array.shape, array)
            for name, array in self._arrays.items()
        ]
        outputs = None if layout.requested is None else dict.fromkeys(layout.requested)
        return self.codec.infer(self.known.spec.name, self.settings.options, inputs=inputs, outputs=outputs)

    def result(self, answer: Any) -> Result:
        """Return a response's outputs; those that it does not have are left out."""
        response, spec = self.codec.result(answer), self.known.spec
        found = {}
        for name in spec.outputs if self.layout.requested is None else self.layout.requested:
            array = checked_output(self.codec, response, spec, name)
            if array is not None:
                found[name] = array
        return Result(found, self.path, lambda: response, in_response=tuple(found))

    def send(self, timeout_s: float) -> Steps[Result]:
        if self.is_closed:
            raise ClosedError("this call")
        result = self.result((yield Send(self.message(), timeout_s)))
        for name in self.known.spec.outputs if self.layout.requested is None else self.layout.requested:
            if name not in result.in_response:
                raise missing_output(self.known.spec.name, name)
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
