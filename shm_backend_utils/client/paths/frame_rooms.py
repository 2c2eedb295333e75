"""Room for a stream's frames beside its ring, of the size that earlier frames have turned out to need."""

from __future__ import annotations

from collections.abc import Mapping

from ...protocol.call_layout import aligned
from ...protocol.frame_table import REGION, encode_rooms
from ...protocol.spans import OutputSpan, Ring
from .further import HostMemory

__all__ = ["FrameRooms", "needed_bytes"]


def needed_bytes(byte_sizes: Mapping[str, int], frames: int) -> int:
    """Return how many bytes all frames together need for outputs of these sizes."""
    return frames * sum(map(aligned, byte_sizes.values()))


class FrameRooms:
    """Room for some outputs of every frame, in a region of the client's.

    Parameters
    ----------
    further : HostMemory
        With room for what :func:`needed_bytes` says.
    byte_sizes : mapping of str to int
        Those of the outputs.

    Attributes
    ----------
    further : HostMemory
    byte_sizes : mapping of str to int
    """

    def __init__(self, further: HostMemory, byte_sizes: Mapping[str, int]) -> None:
        self.further = further
        self.byte_sizes = byte_sizes
        self._first: dict[str, OutputSpan] = {}
        begin = at = aligned(further.region.data_offset)
        for name, byte_size in byte_sizes.items():
            self._first[name] = OutputSpan(REGION, at, byte_size)
            at += aligned(byte_size)
        self._stride = at - begin

    def table(self, place: int) -> bytes:
        """Return what the record of a place says of them."""
        rooms = Ring(0, place + 1, self._stride).outputs(self._first, place)
        return encode_rooms(self.further.claim, rooms)
