"""The table of a frame: room for its outputs beside its stream's ring. Pure: bytes in, bytes out.

A ring does not grow, so a client that has seen that frames need more lends its stream another region, and says in the
record of each of the ring's places where its outputs find room there. It is a table like that of a request
(:mod:`.table`), with one further region, which is lent, and with outputs alone, all of them in that region. The word in
front of it releases frames, as ever. The last word of the client's half, ``room_since``, is written after the table,
and says which response came last before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import TableError
from . import table
from .claims import LentRegionClaim
from .spans import OutputSpan, Table, brief

__all__ = ["REGION", "decode_rooms", "encode_rooms", "in_a_frame", "room_since"]

REGION: Final = 1
"""The number of a frame's further region."""

_WORD: Final = 8
_MAX_INT64: Final = 2**63 - 1


def encode_rooms(claim: LentRegionClaim, rooms: Mapping[str, OutputSpan]) -> bytes:
    """Return a frame's table in its binary form, without the words in front of it and at the end of the record."""
    return table.encode(Table({}, dict(rooms), (claim,)))


def room_since(data: bytes) -> int:
    """Return the last word of what was copied out of a record."""
    return int.from_bytes(data[-_WORD:], "little")


def decode_rooms(data: bytes) -> tuple[LentRegionClaim, Table]:
    """Check a frame's table that was copied out of its record.

    Parameters
    ----------
    data : bytes
        The client's half of the record, the whole of it.

    Returns
    -------
    LentRegionClaim, Table
        The region, and the table that names it. Whether the region has room for its spans, only opening it tells.

    Raises
    ------
    TableError
        The table breaks the protocol. The message names the field, and never a key or a token.
    """
    try:
        _, said = table.decode(data[:-_WORD], 0, _MAX_INT64)
        if said.inputs:
            raise TableError("input_count", str(len(said.inputs)), "0: a frame has outputs alone")
        if said.ring is not None:
            raise TableError("frame_count", str(said.ring.frames), "0: a frame has no ring of its own")
        if len(said.regions) != 1:
            raise TableError("region_count", str(len(said.regions)), "1: that which has the room")
        (claim,) = said.regions
        if not isinstance(claim, LentRegionClaim):
            raise TableError("regions[1].kind", "another kind", "1: a region that is lent")
        for name, span in said.outputs.items():
            if span.region != REGION:
                raise TableError(f"outputs.{brief(name)}.region", str(span.region), str(REGION))
    except TableError as error:
        raise in_a_frame(error) from None
    return claim, said


def in_a_frame(error: TableError) -> TableError:
    """Return the same error, of a field of a frame's table."""
    return TableError(f"frame.{error.field}", error.found, error.expected)
