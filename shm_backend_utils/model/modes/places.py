"""The places of a stream's ring, and the room that its client gives them beside the ring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...errors import MachineError, TableError
from ...protocol.claims import LentRegionClaim
from ...protocol.frame_table import decode_rooms, in_a_frame, room_since
from ...protocol.layout import SlotRecord
from ...protocol.spans import OutputSpan, frame_number
from ..call.admission import check_table
from ..context import Context
from ..mapping.further_regions import FurtherRegions
from ..mapping.mapped import Slot, stale
from ..mapping.memory import Memory

__all__ = ["Place", "RoomsBeside"]


class Place:
    """One place of a ring, and where the outputs of its next frame go.

    Parameters
    ----------
    record : SlotRecord
        The place's own.
    rooms : mapping of str to OutputSpan
        In the ring.
    generation : int
        The stream's.

    Attributes
    ----------
    record : SlotRecord
    rooms : mapping of str to OutputSpan
        Those in the ring, or in its stead what the client has given since.
    memories : sequence of Memory
        Of the rooms' regions; none before the stream has begun.
    lent : tuple of LentRegionClaim
        The region beside the ring, if there is one.
    room_since : int
        As of the table that was read last here; at first a number below those of the stream's responses.
    """

    __slots__ = ("_ring_rooms", "lent", "memories", "record", "room_since", "rooms")

    def __init__(self, record: SlotRecord, rooms: Mapping[str, OutputSpan], generation: int) -> None:
        self.record = record
        self.rooms = self._ring_rooms = rooms
        self.memories: Sequence[Memory] = ()
        self.lent: tuple[LentRegionClaim, ...] = ()
        self.room_since = frame_number(generation, -1)

    def move(self, claim: LentRegionClaim, memory: Memory, rooms: Mapping[str, OutputSpan]) -> None:
        """Let outputs of the next frame go to a region beside the ring; the others stay where they were."""
        self.rooms = {**self._ring_rooms, **rooms}
        self.memories = (self.memories[0], memory)
        self.lent = (claim,)


class RoomsBeside:
    """Regions that a client lends its stream, as frames have turned out to be larger than their places.

    To be released when the stream ends.

    Parameters
    ----------
    context : Context
        The session's.
    slot : Slot
        The stream's, whose lease it holds.
    generation : int
        The stream's.
    places : sequence of Place
        Its ring's.
    """

    def __init__(self, context: Context, slot: Slot, generation: int, places: Sequence[Place]) -> None:
        self._context = context
        self._slot = slot
        self._generation = generation
        self._places = places
        self._opened: dict[LentRegionClaim, FurtherRegions] = {}

    def look(self, place: Place) -> None:
        """Have a place, whose frame the client has released, use the table that it has written there.

        The table is copied once, and the copy is checked. Where this machine has no room to map what it names, the
        frames go on as they were.

        Raises
        ------
        TableError, TensorError
            The table breaks the protocol, or the model does not have these outputs.
        RegionRefusedError, RegionGoneError
            Its region may not be opened, or is not there.
        StaleRequestError
            The client has given the stream up.
        """
        try:
            self._move(place, bytes(place.record.request))
        finally:
            self._release(self._opened.keys() - {lent for each in self._places for lent in each.lent})

    def release(self) -> None:
        """Let go of all. Twice is fine."""
        self._release(list(self._opened))

    def _move(self, place: Place, data: bytes) -> None:
        claim, said = decode_rooms(data)
        if len(place.memories) > 1 and not place.lent:
            raise TableError("frame.region_count", "1", "0: the stream's request has further regions of its own")
        try:
            found = self._opened.get(claim) or self._context.resolver.open_further(said, self._slot)
        except MachineError:
            place.room_since = room_since(data)
            return
        except TableError as error:
            raise in_a_frame(error) from None
        self._opened[claim] = found
        # Who gives a stream up raises its generation, and then takes back what it was lent. So it is asked once more.
        if self._slot.record.generation != self._generation:
            raise stale()
        try:
            check_table(self._context.spec, said, (self._slot.memory, *found.memories))
        except TableError as error:
            raise in_a_frame(error) from None
        place.move(claim, found.memories[0], said.outputs)
        place.room_since = room_since(data)

    def _release(self, claims: Iterable[LentRegionClaim]) -> None:
        for claim in claims:
            self._opened.pop(claim).release()
