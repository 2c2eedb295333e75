"""Spans: where a tensor's bytes lie, in which region. A checked table has one span for each tensor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..dtypes import DType
from ..errors import TableError
from .claims import RegionClaim

__all__ = [
    "MAX_FRAMED_GENERATION",
    "MAX_FRAMES",
    "MAX_TENSORS",
    "Extent",
    "InputSpan",
    "OutputSpan",
    "Ring",
    "Table",
    "brief",
    "check_extents_are_apart",
    "check_outputs_are_apart",
    "frame_number",
]

MAX_TENSORS: Final = 512
"""The most inputs and outputs of a table together, or outputs of results; a limit bounds the time of checks."""
MAX_FRAMES: Final = 64
MAX_FRAMED_GENERATION: Final = 2**32 - 1
"""The last generation whose frame numbers fit in 64 bits."""
_FRAME_BITS: Final = 32


class InputSpan(NamedTuple):
    """An input tensor's bytes: C-contiguous, ``byte_size`` of them from ``offset`` on."""

    dtype: DType
    shape: tuple[int, ...]  # with the batch dimension, where the model has one
    region: int  # 0 is the slot's own, 1 the first of the table's further regions
    offset: int  # from the beginning of a managed region, an allocation, or the part registered under a name
    byte_size: int  # the size of dtype and shape; strings may take less


class OutputSpan(NamedTuple):
    """Room for an output tensor of up to ``byte_size`` bytes; region and offset are like those of an input."""

    region: int
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of frames: where the responses of a decoupled model go, one after another.

    Frame n lies in place n modulo ``frames``. The table gives the outputs of place 0; those of each further place lie
    ``stride`` bytes after those of the place before. Places do not interleave: in every region, the outputs of a place
    lie within ``stride`` bytes. Each place has a slot record, by which the two sides take turns:

    - the model writes a frame, its results, and the frame's number as ``completed``;
    - the client writes that number as ``generation`` when it no longer reads the frame.
    """

    slot: int  # place 0 has this slot's record; each further place has the record of the next slot
    frames: int  # how many places, 1 to MAX_FRAMES
    stride: int  # bytes from one place to the next

    def outputs(self, first: Mapping[str, OutputSpan], place: int) -> dict[str, OutputSpan]:
        """Return the spans of a place; ``first`` has the spans of place 0."""
        further = place * self.stride
        return {name: OutputSpan(region, offset + further, size) for name, (region, offset, size) in first.items()}


def frame_number(generation: int, index: int) -> int:
    """Return the number of a request's frame; the first has index 0. No two requests of a slot share a number."""
    return (generation << _FRAME_BITS) + index + 1


class Table(NamedTuple):
    """A client's description of a request's tensors, checked."""

    inputs: dict[str, InputSpan]
    outputs: dict[str, OutputSpan]  # room for the wanted outputs; with a ring, the room in place 0
    regions: tuple[RegionClaim, ...] = ()  # the regions of spans from number 1 on
    ring: Ring | None = None  # for streams
    fits: bool = False  # whether TableForm has also checked the table against the model's configuration


Extent = tuple[int, int, int, str]
"""The bytes of a tensor: region, begin, end, and an output's name, which is empty for an input."""


def check_outputs_are_apart(table: Table) -> None:
    """Raise TableError if an output, in any place of a ring, overlaps another tensor. Inputs may overlap."""
    extents: list[Extent] = [
        (span.region, span.offset, span.offset + span.byte_size, name)
        for name, span in table.outputs.items()
        if span.byte_size
    ]
    if not extents:
        return
    inputs: list[Extent] = [
        (span.region, span.offset, span.offset + span.byte_size, "") for span in table.inputs.values() if span.byte_size
    ]
    if table.ring is not None:
        _check_ring_is_apart(table.ring, extents, inputs)
    check_extents_are_apart(extents + inputs)


def check_extents_are_apart(extents: list[Extent]) -> None:
    """Raise :class:`TableError` if an output's extent overlaps another one. No extent may be empty. Sorts the list."""
    extents.sort()
    last_region, reach, last_output = -1, 0, ""
    for region, begin, end, output in extents:
        if region == last_region and begin < reach and (output or last_output):
            raise _overlap(output or last_output)
        if region != last_region or end > reach:
            last_region, reach, last_output = region, end, output


def _check_ring_is_apart(ring: Ring, outputs: Iterable[Extent], inputs: Iterable[Extent]) -> None:
    """Check that a ring's places overlap neither each other nor an input; outputs within one place are not checked."""
    places: dict[int, tuple[int, int, str]] = {}
    for region, begin, end, name in outputs:
        first, last, _ = places.get(region, (begin, end, name))
        places[region] = (min(first, begin), max(last, end), name)
    for begin, end, _ in places.values():
        if ring.frames > 1 and end - begin > ring.stride:
            raise TableError("frame_stride", str(ring.stride), f"at least {end - begin}, which a place's outputs take")
    last_place = (ring.frames - 1) * ring.stride
    for region, begin, end, _ in inputs:
        if region in places:
            first, last, name = places[region]
            if begin < last + last_place and first < end:
                raise _overlap(name)


def _overlap(output: str) -> TableError:
    return TableError(f"outputs.{brief(output)}", "bytes of another tensor", "bytes of its own")


def brief(text: str) -> str:
    """Return a peer's text in a form that a message may show: cut if long, and escaped where not printable."""
    cut = text if len(text) <= 64 else f"{text[:61]}..."
    return repr(cut)[1:-1]
