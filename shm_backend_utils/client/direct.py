"""A call on the direct path: the request names memory that the model maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import PeerError, SlotInDoubtError, TensorError
from ..memory.cuda.events import Event
from ..protocol import descriptor
from ..protocol.descriptor import PARAMETER, Descriptor, InputSpan, OutputSpan
from ..protocol.results import OutputPlace, parse_events, parse_results, unused_memory
from ..tensors.strings import Strings
from .berth import Berth
from .errors import InferenceError, MemoryRefusedError
from .exchange import Exchange, is_answer, no_strings
from .options import RequestOptions
from .plan import CallPlan
from .result import Result, result_of
from .space import Space
from .transport import Request, Transport

__all__ = ["DirectExchange", "PreparedExchange", "keep", "spans_in"]

_OF_A_REGION: Final = f"{PARAMETER}.regions["


class DirectExchange(Exchange):
    """Tensors lie in a slot. Its generation fences one request from the next.

    Parameters
    ----------
    berth : Berth
        Its memory.
    """

    path = "direct"

    def __init__(self, transport: Transport, options: RequestOptions, berth: Berth) -> None:
        slot, turn, plan, memory = berth
        super().__init__(transport, plan, options)
        self.memory = memory
        self.inputs: Mapping[str, npt.NDArray[Any]] = MappingProxyType(slot.input_arrays(plan, memory))
        self._slot = slot
        self._turn = turn
        self._spaces = slot.spaces(plan.devices)
        self._byte_sizes = [space.byte_size for space in self._spaces]
        self._descriptor = self._describe()
        self._message = transport.encode(self._whole_request())
        self._last_results: tuple[bytes, tuple[OutputPlace, ...], tuple[Event, ...]] = (b"", (), ())

    def did_not_start(self, error: BaseException) -> bool:
        """Return whether the server refused the request, and the model has not begun with it."""
        return is_answer(error) and not self._turn.is_started

    async def _infer(self, timeout_s: float) -> Result:
        for space in self._spaces[1:]:
            space.finish_writing()
        turn = self._turn
        if turn.is_in_doubt and not turn.reclaim():
            raise SlotInDoubtError(
                "a request of this call got no answer, and a model is still executing it in this call's memory; infer "
                "again later, or prepare another call"
            )
        generation = turn.advance()
        try:
            response = await self._transport.infer(self._message, timeout_s, generation)
            # Nothing local refers to the memory: an error that somebody keeps, keeps all locals.
            record = turn.record
            if record.completed != generation:
                raise unused_memory(self.plan.spec.name)
            text = record.results()
            if text != self._last_results[0]:
                places = self._all_wanted(parse_results(text, self._byte_sizes))
                self._last_results = text, places, parse_events(text)
            _, places, events = self._last_results
            if events:
                self._slot.listener.wait_on_streams(events)
            return result_of(places, self._spaces, self.memory, response, self.plan.input_byte_size)
        except BaseException as error:
            turn.is_in_doubt = not turn.is_completed
            if isinstance(error, InferenceError) and self.did_not_start(error) and _OF_A_REGION in str(error):
                self._slot.is_spoiled = True  # somebody removed or truncated it, or it never could be opened
                raise MemoryRefusedError(
                    f"{error.message()}; this call's memory is lost: prepare another call", error.status()
                ) from None
            raise

    def _all_wanted(self, places: tuple[OutputPlace, ...]) -> tuple[OutputPlace, ...]:
        missing = set(self.plan.wanted) - {place.name for place in places}
        if missing:
            raise PeerError(f"model {self.plan.spec.name!r} answered without output {min(missing)!r}")
        return places

    def _whole_request(self) -> Request:
        return self._request(self._carriers(), self._wanted(), {PARAMETER: self._descriptor})

    def _describe(self) -> str:
        inputs, outputs = spans_in(self.plan, self._spaces)
        claims = self._slot.claims(self._turn, self.plan.devices)
        return descriptor.encode(Descriptor(self.plan.spec.name, claims, inputs, outputs))


class KeptExchange(DirectExchange):
    """One that stays in its slot for the next call like this one, which then need not be laid out and encoded again.

    Its own views of the slot do not count as use. Each call lends it the memory for its results.
    """

    def close(self) -> None:
        self.memory = np.empty(0, np.uint8)


def spans_in(plan: CallPlan, spaces: Sequence[Space]) -> tuple[dict[str, InputSpan], dict[str, OutputSpan]]:
    """Return a plan's spans as a descriptor has them, from the beginning of each memory."""
    begins = [space.begin for space in spaces]
    return (
        {name: replace(span, offset=begins[span.region] + span.offset) for name, span in plan.inputs.items()},
        {name: replace(span, offset=begins[span.region] + span.offset) for name, span in plan.outputs.items()},
    )


class PreparedExchange(DirectExchange):
    """One whose inputs the user fills. Strings are objects there, and become bytes with each request."""

    def __init__(self, transport: Transport, options: RequestOptions, berth: Berth) -> None:
        super().__init__(transport, options, berth)
        plan = berth.plan
        self._rooms = {name: self.inputs[name] for name in plan.strings}
        self.inputs = MappingProxyType({**self.inputs, **no_strings(plan)})

    def close(self) -> None:
        super().close()
        self._rooms = {}

    async def _infer(self, timeout_s: float) -> Result:
        for name, room in self._rooms.items():
            encoded = Strings.of(name, self.inputs[name]).encoded
            if encoded.nbytes > room.nbytes:
                raise TensorError(
                    name,
                    f"the strings of input {name!r} take {encoded.nbytes} bytes, but the call was prepared for "
                    f"{room.nbytes}; describe them as (shape, 'S100') if 100 is the length of the longest",
                )
            room[: encoded.nbytes] = encoded
        return await super()._infer(timeout_s)


def keep(transport: Transport, options: RequestOptions, berth: Berth) -> DirectExchange:
    """Return the exchange that a turn keeps for calls like this one, with memory for the next result."""
    turn = berth.turn
    kept: KeptExchange | None = turn.kept
    if kept is None or kept.plan is not berth.plan or kept.options != options:
        kept = turn.kept = KeptExchange(transport, options, berth._replace(memory=berth.slot.memory()))
    kept.memory = berth.memory
    return kept
