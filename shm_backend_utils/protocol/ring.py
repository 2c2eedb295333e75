"""A ring of frames: where the responses of a decoupled model go, one after another. No I/O.

Frame 0 lies where the descriptor's outputs say, the next one ``stride`` bytes further, and so on; after the last one of
the ring comes the first again. Each place has a slot record, by which the two sides take turns:

- the model writes a frame, its results, and the frame's number as ``completed``;
- the client writes the number as ``generation`` when nobody reads the frame any more.

Numbers begin with the request's generation, so that no frame of an earlier request can be meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..errors import DescriptorError
from .json_checks import check_fields, integer, kind_of

if TYPE_CHECKING:
    from .descriptor import OutputSpan

__all__ = ["MOST_FRAMES", "Ring", "encode_ring", "frame_number", "parse_ring"]

MOST_FRAMES: Final = 64
_FIELDS: Final = frozenset({"slot", "frames", "stride"})
_NUMBER_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of frames.

    Attributes
    ----------
    slot : int
        Index of the record of the first place, in the slot table of the descriptor's first managed region.
    frames : int
        How many places there are.
    stride : int
        Bytes from one place to the next.
    """

    slot: int
    frames: int
    stride: int

    def outputs(self, first: Mapping[str, OutputSpan], place: int) -> dict[str, OutputSpan]:
        """Return the spans of a place; ``first`` are those of the first one."""
        return {name: replace(span, offset=span.offset + place * self.stride) for name, span in first.items()}


def frame_number(generation: int, index: int) -> int:
    """Return the number of a request's frame; the first has index 0."""
    return (generation << _NUMBER_BITS) + index + 1


def encode_ring(ring: Ring) -> dict[str, int]:
    """Return a ring as a JSON object."""
    return {"slot": ring.slot, "frames": ring.frames, "stride": ring.stride}


def parse_ring(value: Any) -> Ring:
    """Check a decoded JSON value and return it as a ring; raises DescriptorError."""
    if type(value) is not dict:
        raise DescriptorError("ring", kind_of(value), "an object")
    check_fields("ring", value, _FIELDS)
    return Ring(
        integer("ring", "slot", value["slot"], 0),
        integer("ring", "frames", value["frames"], 1, MOST_FRAMES),
        integer("ring", "stride", value["stride"], 0),
    )
