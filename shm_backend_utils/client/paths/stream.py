"""A stream on the direct path: responses arrive in a ring of frames, whose places are free when nobody reads them."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, Final, SupportsIndex

import numpy as np

from ...errors import CallerError, ClosedError
from ...memory.pool.slot import SlotRegion
from ...model_spec import ModelSpec
from ...protocol import results
from ...protocol.call_layout import ALIGNMENT, CallLayout
from ...protocol.spans import MAX_FRAMES, Ring, frame_number
from ...protocol.table import encode
from ..known_model import KnownModel
from ..result import Result
from ..settings import CallSettings
from ..transports.messages import Codec
from .call import HostMemory, InRegion
from .direct import result_of

__all__ = ["FEW_FRAMES", "USUAL_FRAMES", "DirectStream", "check_frames", "guessed_rooms", "ring_end"]

USUAL_FRAMES: Final = 8
FEW_FRAMES: Final = 4
"""As many if they are large. Where a model's next place is not free yet, it waits a tenth of a millisecond, or more."""


def check_frames(spec: ModelSpec, frames: SupportsIndex | None) -> int | None:
    """Return the number of a ring's frames, None if nobody says it; CallerError if the stream cannot have so many."""
    if frames is None:
        return None
    if not spec.is_decoupled:
        raise CallerError(
            f"frames is {frames!r}, but model {spec.name!r} is not decoupled: its stream has one response; leave "
            "frames out, or use infer()"
        )
    try:
        count = operator.index(frames)
    except TypeError:
        count = 0
    if not 1 <= count <= MAX_FRAMES:
        raise CallerError(f"frames is {frames!r}; expected a whole number, 1 to {MAX_FRAMES}")
    return count


def ring_end(layout: CallLayout, frames: int) -> int:
    """Return where a stream's last tensor ends in its region: there is room for the inputs, and for all frames."""
    return layout.end + (frames - 1) * _stride(layout)


def guessed_rooms(layout: CallLayout, frames: int, most_bytes: int) -> dict[str, int]:
    """Return bytes per row for those outputs of a stream that have no room yet, as nobody knows their size.

    Without a guess, the first frames of a client's first stream would come back through Triton.
    """
    unknown = [name for name, room in layout.table.outputs.items() if not room.byte_size and name not in layout.certain]
    if not unknown:
        return {}
    share = most_bytes // (frames * len(unknown) * (layout.batch_size or 1))
    return dict.fromkeys(unknown, share & -ALIGNMENT)


class DirectStream(InRegion):
    """One request to a decoupled model. The first slot of its region is the request's, the others are the frames'."""

    path = "direct"

    def __init__(
        self,
        codec: Codec,
        settings: CallSettings,
        known: KnownModel,
        layout: CallLayout,
        region: SlotRegion,
        memory: HostMemory,
    ) -> None:
        self._slot, *self._frames = region.slots
        ring = Ring(1, len(self._frames), _stride(layout))
        self.layout = layout._replace(table=layout.table._replace(ring=ring))
        self.memory = memory
        self._codec = codec
        self._settings = settings
        self._spec = known.spec
        self._byte_sizes = (region.byte_size,)
        self._index = 0
        self._released: dict[int, weakref.ref[HostMemory]] = {}
        self._inputs_end = max((span.offset + span.byte_size for span in layout.table.inputs.values()), default=0)

    def message(self) -> Any:
        """Begin the request, and return its message."""
        layout, name = self.layout, self._spec.name
        generation = self._slot.begin(encode(layout.table))
        return self._codec.infer(
            name,
            self._settings.options,
            outputs=None if layout.requested is None else dict.fromkeys(layout.requested),
            batch_size=layout.batch_size,
            slot=(self._slot.address_pattern % name, generation),
        )

    def result(self, answer: Any) -> Result:
        """Return the outputs of the next response.

        PeerError if the model has not written its frame, or by another protocol, or not by its configuration.
        """
        place = self._index % len(self._frames)
        number = frame_number(self._slot.generation, self._index)
        frame = self._frames[place]
        data = bytes(frame.results)
        if not data:
            raise ClosedError("this client")
        places, *_ = results.decode(data, self._byte_sizes, 0, self._spec, number)
        # What this frame's arrays keep. NumPy has arrays keep the first of a chain of arrays, hence the memoryview.
        memory = np.frombuffer(self.memory.data, np.uint8)
        response = functools.partial(self._codec.result, answer)
        result = result_of(places, memory, (), response, inputs_end=self._inputs_end)
        self._released[place] = weakref.ref(memory, lambda _: frame.release_frame(number))
        self._index += 1
        return result

    @property
    def is_held(self) -> bool:
        """Whether the user holds every frame, so that the model has no place for its next response."""
        return len(self._released) == len(self._frames) and all(
            memory() is not None for memory in self._released.values()
        )

    def close(self) -> None:
        """Give the memory back, as soon as no array needs it. Twice is fine."""
        if not self.is_closed:
            self._slot.give_up()
        self.is_closed = True
        self.memory = np.empty(0, np.uint8)


def _stride(layout: CallLayout) -> int:
    """Return how far the frames lie apart: the outputs lie behind the inputs, and end where a tensor may begin."""
    return layout.end - min((span.offset for span in layout.table.outputs.values()), default=layout.end)
