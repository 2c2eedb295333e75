"""The direct path of one request: tensors in the client's memory, fenced by the slot's generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt

from ..descriptor import Descriptor, InputSpan, OutputSpan, SystemRegionClaim
from ..dtypes import DType
from ..errors import DescriptorError, ModelError, ReplayedRequestError, StaleRequestError
from ..region.layout import MAX_RESULTS_LENGTH, SlotRecord
from ..region.managed import ManagedRegion, array_at
from ..view import TensorView
from .mappings import Mappings

__all__ = ["PATH", "DirectTensors"]

PATH: Final = "direct"


class DirectTensors:
    """The inputs, outputs and slots that a request's descriptor names. Nothing is written before :meth:`begin`."""

    __slots__ = ("_claims", "_memories", "_records", "_results", "descriptor")

    def __init__(self, descriptor: Descriptor, mappings: Mappings) -> None:
        """Map the descriptor's regions and check its spans against what they really are."""
        self.descriptor = descriptor
        self._claims = descriptor.regions
        self._results: dict[str, list[Any] | None] = {}
        regions = [mappings.get(claim, f"regions[{index}]") for index, claim in enumerate(descriptor.regions)]
        _check_spans_are_data("inputs", descriptor.inputs, regions)
        _check_spans_are_data("outputs", descriptor.outputs, regions)
        self._memories = [region.bytes() for region in regions]
        self._records = [region.record(claim.slot) for region, claim in zip(regions, self._claims, strict=True)]

    def begin(self) -> None:
        """Claim this request's generation for execution.

        Raises
        ------
        StaleRequestError
            The client has raised a slot's generation since: it gave this request up.
        ReplayedRequestError
            A model has begun with this generation before.
        """
        for index, (record, claim) in enumerate(zip(self._records, self._claims, strict=True)):
            _check_generation(record, claim, index)
        for record, claim in zip(self._records, self._claims, strict=True):
            record.started = claim.generation

    def input(self, name: str) -> TensorView | None:
        """Return an input where the client wrote it, read-only; None if the descriptor does not have it."""
        span = self.descriptor.inputs.get(name)
        if span is None:
            return None
        array = array_at(self._memories[span.region], span.offset, span.dtype.numpy, span.shape)
        array.flags.writeable = False
        return TensorView(name, array, span.dtype, PATH)

    def output(self, name: str, dtype: DType, shape: tuple[int, ...], nbytes: int) -> npt.NDArray[Any] | None:
        """Return the client's memory for an output, writable; None if there is none or it is too small."""
        span = self.descriptor.outputs.get(name)
        if span is None or nbytes > span.byte_size:
            self._results[name] = None
            return None
        self._results[name] = [dtype.name, shape, nbytes, span.region, span.offset]
        return array_at(self._memories[span.region], span.offset, dtype.numpy, shape)

    def pass_through(self, name: str, dtype: DType, array: npt.NDArray[Any]) -> bool:
        """Let an output be memory of an input, if ``array`` is such memory: nothing is copied. Return whether it is."""
        if name not in self.descriptor.outputs or not array.flags.c_contiguous or not array.nbytes:
            return False
        address = array.__array_interface__["data"][0]
        for span in self.descriptor.inputs.values():
            begin = self._memories[span.region].__array_interface__["data"][0] + span.offset
            if begin <= address and address + array.nbytes <= begin + span.byte_size:
                offset = span.offset + address - begin
                self._results[name] = [dtype.name, array.shape, array.nbytes, span.region, offset]
                return True
        return False

    def complete(self, names: Mapping[str, object]) -> None:
        """Write the results of these outputs and the completion stamps. The last thing before the response."""
        results = json.dumps({name: self._results[name] for name in names}, separators=(",", ":")).encode()
        if len(results) > MAX_RESULTS_LENGTH:
            raise ModelError(
                f"the results of {len(names)} outputs take {len(results)} bytes, but a slot record has room for "
                f"{MAX_RESULTS_LENGTH}; request fewer outputs at once"
            )
        self._stamp(results)

    def fail(self) -> None:
        """Write the completion stamps of a call that failed: the client may have its memory back."""
        self._stamp(b"")

    def _stamp(self, results: bytes) -> None:
        for record, claim in zip(self._records, self._claims, strict=True):
            record.complete(claim.generation, results)


def _check_spans_are_data(
    group: str, spans: Mapping[str, InputSpan] | Mapping[str, OutputSpan], regions: list[ManagedRegion]
) -> None:
    for name, span in spans.items():
        data_offset = regions[span.region].data_offset
        if span.offset < data_offset:
            raise DescriptorError(f"{group}.{name}[1]", str(span.offset), f"at least {data_offset}, where data begins")


def _check_generation(record: SlotRecord, claim: SystemRegionClaim, index: int) -> None:
    if record.generation != claim.generation:
        raise StaleRequestError(
            f"shm_io.regions[{index}].generation is not the slot's; the client has given this request up"
        )
    if record.started >= claim.generation:
        raise ReplayedRequestError(
            f"shm_io.regions[{index}].generation was executed before; send every request with a generation of its own"
        )
