"""Where the outputs of a direct call go: spans in the client's memory, and what is said of them in the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dtypes import BYTES, DType
from ..errors import ModelError
from ..protocol.descriptor import InputSpan, OutputSpan
from ..protocol.region_layout import MAX_RESULTS_LENGTH
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .memory import Memory

__all__ = ["DIRECT", "Output", "Places"]

DIRECT: Final = "direct"
_MOST_REMEMBERED: Final = 64


class Output:
    """One output that the model has made; hashable by identity.

    Attributes
    ----------
    name : str
    view : TensorView
        Over the output's memory.
    place : list or None
        What the client reads in the results: data type, shape, byte size, region and offset. If the output is not in
        the client's memory and goes back through Triton: None, or of strings the data type and the shape.
    source : TensorView or None
        What the model fills instead of ``view``; it is copied there when the call ends.
    """

    __slots__ = ("name", "place", "source", "view")

    def __init__(self, view: TensorView, place: list[Any] | None = None, source: TensorView | None = None) -> None:
        self.source = source
        self.name = view.name
        self.view = view
        self.place = place

    @property
    def is_delivered(self) -> bool:
        """Whether it is in the client's memory."""
        return self.place is not None and len(self.place) > 2


class Places:
    """Room for one set of outputs.

    Parameters
    ----------
    inputs, outputs : mapping
        The descriptor's spans; the outputs of one frame, where there are several.
    memories : sequence of Memory
        Of the descriptor's regions.
    has_results : bool
        Whether there is a slot record, in which the client reads where its outputs are.
    """

    def __init__(
        self,
        inputs: Mapping[str, InputSpan],
        outputs: Mapping[str, OutputSpan],
        memories: Sequence[Memory],
        has_results: bool,
    ) -> None:
        self._input_spans = inputs
        self._output_spans = outputs
        self._memories = memories
        self._has_results = has_results
        self._outputs: dict[tuple[str, tuple[int, ...], np.dtype[Any]], Output] = {}
        self._results: dict[tuple[Output, ...], bytes] = {}

    def known_output(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output | None:
        """Return what :meth:`output` returned for these before; None if it did not."""
        return self._outputs.get((name, shape, dtype))

    def output(self, name: str, shape: tuple[int, ...], dtype: DType) -> Output | None:
        """Return an output in the client's memory, writable; None if there is no room for it."""
        span = self._output_spans.get(name)
        if span is None:
            return None
        memory = self._memories[span.region]
        view = memory.view(name, DIRECT, span.offset, span.byte_size, dtype, shape, writable=True)
        if view is None:
            return None
        place = [dtype.name, shape, view.attributes.byte_size, span.region, span.offset]
        output = Output(view, place)
        _forget_if_many(self._outputs)
        self._outputs[name, shape, dtype.numpy] = output
        return output

    def strings(self, name: str, shape: tuple[int, ...], encoded: npt.NDArray[np.uint8]) -> Output | None:
        """Copy strings to the client's memory and return them as an output; None if there is no room for them."""
        span = self._output_spans.get(name)
        if span is None or encoded.nbytes > span.byte_size:
            return None
        view = self._memories[span.region].view(name, DIRECT, span.offset, encoded.nbytes, BYTES, shape, writable=True)
        if not isinstance(view, StringsView):
            return None
        view.strings().encoded[:] = encoded
        return Output(view, [BYTES.name, shape, encoded.nbytes, span.region, span.offset])

    def pass_through(self, name: str, dtype: DType, array: Any, shape: tuple[int, ...]) -> Output | None:
        """Return an output that *is* memory of an input, so that nothing is copied; None if ``array`` is no such."""
        if not self._has_results or name not in self._output_spans or not array.nbytes:
            return None  # nobody would read in the results where the output is
        nbytes = array.nbytes
        for span in self._input_spans.values():
            memory = self._memories[span.region]
            offset = memory.offset_of(array)
            if offset is not None and span.offset <= offset and offset + nbytes <= span.offset + span.byte_size:
                view = memory.view(name, DIRECT, offset, nbytes, dtype, shape, writable=False)
                assert view is not None
                return Output(view, [dtype.name, shape, nbytes, span.region, offset])
        return None

    def results(self, outputs: Sequence[Output]) -> bytes:
        """Return the results of a call with these outputs, encoded; nothing if there is no slot to write them to."""
        if not self._has_results:
            return b""
        key = tuple(outputs)
        known = self._results.get(key)
        if known is not None:
            return known
        results = json.dumps({output.name: output.place for output in outputs}, separators=(",", ":")).encode()
        if len(results) > MAX_RESULTS_LENGTH:
            raise ModelError(
                f"the results of {len(outputs)} outputs take {len(results)} bytes, but a slot record has room for "
                f"{MAX_RESULTS_LENGTH}; request fewer outputs at once"
            )
        _forget_if_many(self._results)
        self._results[key] = results
        return results


def _forget_if_many(remembered: dict[Any, Any]) -> None:
    """Keep a model whose shapes vary without end from filling memory."""
    if len(remembered) >= _MOST_REMEMBERED:
        remembered.clear()
