"""The direct path: the request names a slot, and the slot says everything else."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import ClosedError, SlotInDoubtError
from ...memory.kinds import RegionKind
from ...memory.pool.slot import Slot, SlotRegion
from ...memory.pool.states import AFTER, FREE
from ...protocol import results
from ...protocol.answers import missing_output
from ...protocol.refusals import NOT_OPENED, code_in
from ...protocol.results import broken_results
from ...protocol.spans import InputSpan
from ...protocol.table import encode
from ...tensors.strings import Strings
from ..errors import InferenceError, MemoryRefusedError
from ..inputs.sources import Source
from ..result import Result
from ..steps import Send, Steps
from .buffers import Buffer
from .call import Call, HostMemory, InRegion, is_answer, output_in
from .inline import no_strings, source_of
from .on_gpus import CallOnGpus

__all__ = ["DirectCall", "result_of", "still_at_work"]

_BYTE_SIZE: Final = operator.attrgetter("byte_size")
_BY_PLACE: Final = operator.attrgetter("region", "offset")
_BYTE: Final = np.dtype(np.uint8)
_NO_MEMORY: Final[HostMemory] = np.empty(0, np.uint8)


@dataclass(eq=False, repr=False)
class DirectCall(InRegion, Call):
    """A call whose tensors lie in a slot. Its generation fences one request from the next.

    The slot is given back when ``memory``, which is its whole region, and every array made from it are gone.
    """

    region: SlotRegion
    slot: Slot
    memory: HostMemory
    gpus: CallOnGpus | None = field(default=None, init=False)
    buffers: Sequence[Buffer] = ()
    """What the table names beside the slot's own region, from number 1 on."""

    path = "direct"

    @property
    def kind(self) -> RegionKind:
        return self.region.kind

    def arrays(self) -> dict[str, Any]:
        memory, inputs = self.memory, self.layout.table.inputs
        on_host = {name: self._input(memory, span) for name, span in inputs.items() if not span.region}
        return on_host | no_strings(self.layout)

    def sources(self) -> dict[str, Source]:
        memory = self.memory
        found: dict[str, Source] = {} if self.gpus is None else {**self.gpus.sources(memory)}
        for name, span in self.layout.table.inputs.items():
            if span.region:
                continue
            array = self._input(memory, span)
            if span.dtype is BYTES:
                array = Strings.encoded_as(name, array, span.shape).numpy()
            found[name] = source_of(name, array)
        return found

    def did_not_start(self, error: BaseException) -> bool:
        """Return whether the server refused the request, and the model has not begun with it."""
        return is_answer(error) and not self.slot.is_started

    def send(self, timeout_s: float) -> Steps[Result]:
        memory, buffers = self.memory, self.buffers  # first: they keep the slot, if the call is closed meanwhile
        if self.is_closed:
            raise ClosedError("this call")
        slot, spec, layout, region, gpus = self.slot, self.known.spec, self.layout, self.region, self.gpus
        if gpus is not None:
            deadline = time.monotonic() + timeout_s
            gpus.check_is_not_lost()
        if slot.state != FREE:
            yield from self._take_back(time.monotonic() + timeout_s)
        slot.kept = buffers
        generation = slot.begin(encode(layout.table))
        try:
            message = self.codec.infer(
                spec.name,
                self.settings.options,
                outputs=None if layout.requested is None else dict.fromkeys(layout.requested),
                batch_size=layout.batch_size,
                slot=(slot.address_pattern % spec.name, generation),
            )
            answer = yield Send(message, timeout_s)
            sizes = [region.data_end, *map(_BYTE_SIZE, buffers)]
            data = bytes(slot.results)
            if not data:
                raise ClosedError("this client")
            outputs, events, _ = results.decode(data, sizes, region.data_offset, spec, generation)
            if events:
                if gpus is None:
                    raise broken_results("an event of memory that has none")
                yield from gpus.outputs_are_ready(outputs, events, deadline)
            names = {place.name for place in outputs}
            for name in spec.outputs if layout.requested is None else layout.requested:
                if name not in names:
                    raise missing_output(spec.name, name)
            avoided = sum(map(_BYTE_SIZE, layout.table.inputs.values()))
            result = result_of(outputs, memory, buffers, functools.partial(self.codec.result, answer), avoided)
        except BaseException as error:
            # A model that has completed the slot may have left the rest to a GPU: its events were not looked at.
            if gpus is None and slot.is_completed:
                slot.become_free("answer")
            if isinstance(error, InferenceError) and self.did_not_start(error):
                self._check_memory_was_opened(error)
            raise
        if gpus is None or not gpus.are_lent_in_use:
            slot.state, slot.kept = AFTER["answer"][slot.state], ()
        return result

    def close(self) -> None:
        self.is_closed = True
        self.memory = _NO_MEMORY
        self.gpus, self.buffers = None, ()

    def _input(self, memory: HostMemory, span: InputSpan) -> Any:
        dtype, shape, _, offset, byte_size = span
        if dtype is BYTES:
            return memory[offset : offset + byte_size]
        return np.ndarray(shape, dtype.numpy, memory, offset)

    def _take_back(self, deadline: float) -> Steps[None]:
        """Make sure that no model is at work for the call, after a request that got no answer."""
        if not self.slot.fence():
            raise still_at_work()
        if self.gpus is not None:  # a model that has ended may have left the rest to its GPU
            yield from self.gpus.reclaimed(self.slot, deadline)
        self.slot.become_free("reclaim")

    def _check_memory_was_opened(self, error: InferenceError) -> None:
        """Raise MemoryRefusedError if an answer says that the model could not open the memory, or not any more."""
        if code_in(str(error)) in NOT_OPENED:
            self.region.spoil("refusal")
            message = f"{error.message()}; this call's memory is lost: prepare another call"
            raise MemoryRefusedError(message, error.status()) from None


def still_at_work() -> SlotInDoubtError:
    """Return the error for a call whose memory a model uses for an earlier request."""
    return SlotInDoubtError(
        "a request of this call got no answer, and a model is still executing it in this call's memory; infer "
        "again later, or prepare another call"
    )


def result_of(
    places: Sequence[results.OutputPlace],
    memory: HostMemory,
    buffers: Sequence[Buffer],
    response: Callable[[], Any],
    bytes_avoided: int = 0,
    inputs_end: int = 0,
) -> Result:
    """Return the outputs that lie in these places, which were checked against the configuration, or in the response.

    What the model passes on of inputs before ``inputs_end`` is copied: those serve another response, too. PeerError if
    the response lacks an output that came back through Triton, or has it otherwise.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    overflowed: dict[str, int] = {}
    for name, dtype, shape, region, offset, byte_size, is_in_response in places:
        try:
            if is_in_response:
                array = output_in(response(), name)
                if array is None:
                    raise broken_results(f"{name}, which the response lacks")
                overflowed[name] = array.nbytes
                if dtype is BYTES:
                    array = _strings(name, array, shape)
                elif (array.dtype, array.shape) != (dtype.numpy, shape):
                    raise broken_results(f"{name}, which came as {array.dtype} {list(array.shape)}")
            elif dtype is BYTES and region:
                array = _strings(name, buffers[region - 1].array_at(memory, offset, _BYTE, (byte_size,)), shape)
            elif dtype is BYTES:
                array = _strings(name, memory[offset : offset + byte_size], shape)
            elif region:
                array = buffers[region - 1].array_at(memory, offset, dtype.numpy, shape)
            else:
                array = np.ndarray(shape, dtype.numpy, memory, offset)
                if offset < inputs_end:
                    array = array.copy()
        except ValueError as error:  # TensorError is one; or more dimensions, or larger ones, than NumPy has
            raise broken_results(error) from None
        arrays[name] = array
        bytes_avoided += byte_size
    if len(arrays) > 1:
        _separate(places, arrays)
    return Result(arrays, DirectCall.path, response, overflowed, bytes_avoided, tuple(overflowed))


def _separate(places: Sequence[results.OutputPlace], arrays: dict[str, Any]) -> None:
    """Copy outputs that lie in memory of others, as of a model that passes one input on twice.

    Otherwise writing to one output would change another, which it does on no other path. Arrays on GPUs are left as
    they are.
    """
    ends: dict[int, int] = {}
    for place in sorted(places, key=_BY_PLACE):
        array = arrays[place.name]
        if not isinstance(array, np.ndarray):
            continue
        if place.offset < ends.get(place.region, 0):
            arrays[place.name] = array.copy()
        ends[place.region] = max(place.offset + place.byte_size, ends.get(place.region, 0))


def _strings(name: str, encoded: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if not isinstance(encoded, np.ndarray):
        raise broken_results(f"{name}, which are strings, on a GPU")
    if encoded.dtype != _BYTE:
        raise broken_results(f"{name} as {encoded.dtype}")
    return Strings.encoded_as(name, encoded, shape).numpy()
