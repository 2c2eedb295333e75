"""A stream on the direct path: responses arrive in a ring of frames in the slot, free again when nobody reads them."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import CallerError
from ..protocol import descriptor
from ..protocol.descriptor import GENERATION_PARAMETER, PARAMETER, Descriptor
from ..protocol.region_layout import SlotRecord
from ..protocol.results import parse_results, unused_memory
from ..protocol.ring import MOST_FRAMES, Ring, frame_number
from .direct import spans_in
from .exchange import Exchange
from .options import RequestOptions
from .plan import CallPlan
from .result import Result, result_of
from .slot import Slot
from .transport import Transport

__all__ = ["DirectStream", "check_frames", "ring_size"]

_OWN_TURN: Final = 0


def check_frames(frames: int) -> None:
    """Raise CallerError unless a ring may have so many frames."""
    if not 1 <= frames <= MOST_FRAMES:
        raise CallerError(f"a stream of {frames} frames was asked for; expected 1 to {MOST_FRAMES}")


def ring_size(plan: CallPlan, frames: int) -> int:
    """Return the bytes of data that a stream takes: its inputs, and its outputs so many times."""
    return plan.byte_size + (frames - 1) * _stride(plan)


class DirectStream(Exchange):
    """One request to a decoupled model.

    Parameters
    ----------
    slot : Slot
        Its first turn is for the request, the others are for the frames.
    memory : numpy.ndarray of uint8
        The slot's whole region, with room for all frames.
    """

    path = "direct"

    def __init__(
        self,
        transport: Transport,
        plan: CallPlan,
        options: RequestOptions,
        slot: Slot,
        memory: npt.NDArray[np.uint8],
    ) -> None:
        super().__init__(transport, plan, options)
        self.memory = memory
        self.inputs = MappingProxyType(slot.input_arrays(plan, memory))
        self._turn = slot.turns[_OWN_TURN]
        self._records = [turn.record for turn in slot.turns if turn.index != _OWN_TURN]
        self._spaces = slot.spaces(())
        self._byte_sizes = [space.byte_size for space in self._spaces]
        self._released: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
        inputs, outputs = spans_in(plan, self._spaces)
        ring = Ring(1, len(self._records), _stride(plan))
        claims = slot.claims(self._turn, ())
        self._descriptor = descriptor.encode(Descriptor(plan.spec.name, claims, inputs, outputs, ring))

    async def responses(self, patience_s: float) -> AsyncGenerator[Result, None]:
        """Send the request and return its responses as they come, each waited for so long."""
        generation = self._turn.advance()
        parameters = {PARAMETER: self._descriptor, GENERATION_PARAMETER: generation}
        request = self._request(self._carriers(), self._wanted(), parameters)
        responses = self._transport.stream(request, patience_s)
        index = 0
        try:
            async for response in responses:
                if self._records[index % len(self._records)].completed != frame_number(generation, index):
                    raise unused_memory(self.plan.spec.name)
                yield self._frame(response, generation, index)
                index += 1
        finally:
            self._turn.is_in_doubt = not self._turn.is_completed
            await responses.aclose()

    async def _infer(self, timeout_s: float) -> Result:
        raise AssertionError("a stream has responses")

    def _frame(self, response: Any, generation: int, index: int) -> Result:
        record = self._records[index % len(self._records)]
        places = parse_results(record.results(), self._byte_sizes)
        # What this frame's arrays keep. NumPy has arrays keep the first of a chain of arrays, hence the memoryview.
        memory = np.frombuffer(self.memory.data, np.uint8)
        result = result_of(places, self._spaces, memory, response)
        number = frame_number(generation, index)
        self._released[index % len(self._records)] = weakref.ref(memory, lambda _: _release(record, number))
        return result


def _release(record: SlotRecord, number: int) -> None:
    record.generation = number


def _stride(plan: CallPlan) -> int:
    """Return how far the frames lie apart: the outputs lie behind the inputs, and end where a tensor may begin."""
    return plan.byte_size - min((span.offset for span in plan.outputs.values()), default=plan.byte_size)
