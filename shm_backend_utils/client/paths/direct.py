"""The direct path: the request names a slot, and the slot says everything else."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import ClosedError, SlotInDoubtError
from ...memory.cuda.streams import Named
from ...memory.pool.slot import Slot, SlotRegion
from ...model_spec import ModelSpec
from ...protocol import results
from ...protocol.answers import check_places
from ...protocol.call_layout import CallLayout
from ...protocol.refusals import NOT_OPENED, code_in
from ...protocol.results import broken_results, unused_memory
from ...protocol.spans import InputSpan
from ...protocol.table import encode
from ...tensors.strings import Strings
from ..errors import InferenceError, MemoryRefusedError
from ..inputs.sources import Source
from ..options import RequestOptions
from ..result import Result
from ..steps import Send, Steps
from ..transports.messages import Codec, OutputTensor, Request
from .exchange import Exchange, batch_carrier, is_answer, output_in
from .further import FurtherMemory
from .inline import no_strings, source_of
from .on_gpus import CallOnGpus

__all__ = ["DirectExchange", "result_of", "still_at_work"]

Memory = npt.NDArray[np.uint8]

_BYTE_SIZE: Final = operator.attrgetter("byte_size")
_BY_PLACE: Final = operator.attrgetter("region", "offset")
_BYTE: Final = np.dtype(np.uint8)
_NO_MEMORY: Final[Memory] = np.empty(0, np.uint8)


class DirectExchange(Exchange):
    """A call whose tensors lie in a slot. Its generation fences one request from the next.

    The slot is given back when ``memory``, which is its whole region, and every array made from it are gone.
    """

    path = "direct"
    is_kept = False  # by the user, for more requests than one: then others like it will come

    def __init__(
        self,
        codec: Codec,
        spec: ModelSpec,
        layout: CallLayout,
        options: RequestOptions,
        region: SlotRegion,
        slot: Slot,
        memory: Memory,
        gpus: CallOnGpus | None = None,
    ) -> None:
        self.spec, self.layout, self.options = spec, layout, options
        self.kind = region.kind
        self._codec = codec
        self._region = region
        self._slot = slot
        self._memory = memory
        self._gpus = gpus
        self._table = layout.table
        self._further: Sequence[FurtherMemory] = ()
        self._byte_sizes = [region.data_end]
        self._input_bytes = sum(map(_BYTE_SIZE, layout.table.inputs.values()))
        if gpus is not None:
            self.has_gpus, self.library = True, gpus.library
            self._byte_sizes += gpus.byte_sizes
            self._table = gpus.table
            self._further = gpus.further

    def arrays(self) -> dict[str, Any]:
        memory, inputs = self._memory, self._table.inputs
        on_host = {name: self._input(memory, span) for name, span in inputs.items() if not span.region}
        on_gpus = {} if self._gpus is None else self._gpus.arrays(memory)
        return on_host | on_gpus | no_strings(self.layout)

    def write(self, given: Mapping[str, Source]) -> None:
        memory = self._memory  # keeps the slot, if the exchange is closed while another thread copies
        if self.is_closed:
            return
        spans = self._table.inputs
        for name, source in given.items():
            dtype, shape, region, offset, _ = span = spans[name]
            if dtype is BYTES:
                source.write_to(self._input(memory, span))
            elif not region:
                source.write_to(np.ndarray(shape, dtype.numpy, memory, offset))

    def write_from_gpus(self, given: Mapping[str, Source], deadline: float) -> Steps[None]:
        if self._gpus is not None:
            yield from self._gpus.write(given, self._memory, deadline)

    def name_work(self, named: Named) -> None:
        if self._gpus is not None:
            self._gpus.named = named

    def sources(self) -> dict[str, Source]:
        memory = self._memory
        found: dict[str, Source] = {} if self._gpus is None else {**self._gpus.sources(memory)}
        for name, span in self._table.inputs.items():
            if span.region:
                continue
            array = self._input(memory, span)
            if span.dtype is BYTES:
                array = Strings.encoded_as(name, array, span.shape).numpy()
            found[name] = source_of(name, array)
        return found

    def did_not_start(self, error: BaseException) -> bool:
        """Return whether the server refused the request, and the model has not begun with it."""
        return is_answer(error) and not self._slot.is_started

    def send(self, timeout_s: float) -> Steps[Result]:
        if self.is_closed:
            raise ClosedError("this call")
        slot, spec, layout, gpus, loan = self._slot, self.spec, self.layout, self._gpus, None
        if gpus is not None:
            deadline = time.monotonic() + timeout_s
            gpus.check_is_not_lost()
        if slot.is_in_doubt:
            yield from self._take_back(time.monotonic() + timeout_s)
        # They keep the slot, and more, until there is an answer, whoever closes the exchange meanwhile.
        memory, further = self._memory, self._further
        slot.is_in_doubt = True
        generation = slot.begin(encode(self._table))
        if gpus is not None:
            loan = gpus.loan(slot)
        try:
            request = Request(
                spec.name,
                () if layout.batch_size is None else (batch_carrier(layout.batch_size),),
                None if layout.requested is None else list(map(OutputTensor, layout.requested)),
                self.options,
                (slot.address_pattern % spec.name, generation),
            )
            answer = yield Send(self._codec.infer(request), timeout_s)
            outputs, events, completed = results.decode(slot.copy_results(), self._byte_sizes, self._region.data_offset)
            if completed != generation:
                raise unused_memory(spec.name)
            if events:
                if gpus is None:
                    raise broken_results("an event of memory that has none")
                yield from gpus.outputs_are_ready(outputs, events, deadline)
            check_places(spec, spec.outputs if layout.requested is None else layout.requested, outputs)
            response = functools.partial(self._codec.result, answer)
            result = result_of(outputs, memory, further, response, self._input_bytes)
        except BaseException as error:
            # A model that has completed the slot may have left the rest to a GPU: its events were not looked at.
            slot.is_in_doubt = gpus is not None or not slot.is_completed
            if loan is not None:
                loan.end_failed(error)
            if isinstance(error, InferenceError) and self.did_not_start(error):
                self._check_memory_was_opened(error)
            raise
        slot.is_in_doubt = loan is not None and loan.end_answered()
        return result

    def close(self) -> None:
        self.is_closed = True
        self._memory = _NO_MEMORY
        self._gpus, self._further = None, ()

    def _input(self, memory: Memory, span: InputSpan) -> Any:
        dtype, shape, _, offset, byte_size = span
        if dtype is BYTES:
            return memory[offset : offset + byte_size]
        return np.ndarray(shape, dtype.numpy, memory, offset)

    def _take_back(self, deadline: float) -> Steps[None]:
        """Make sure that no model is at work in the slot, after a request that got no answer."""
        if not self._slot.reclaim():
            raise still_at_work()
        if self._gpus is not None:  # a model that has ended may have left the rest to its GPU
            self._slot.is_in_doubt = True  # a wait that is broken off leaves the doubt: the next request waits again
            yield from self._gpus.reclaimed(self._slot, deadline)
            self._slot.is_in_doubt = False

    def _check_memory_was_opened(self, error: InferenceError) -> None:
        """Raise MemoryRefusedError if an answer says that the model could not open the memory, or not any more."""
        if code_in(str(error)) in NOT_OPENED:
            self._region.is_spoiled = True
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
    memory: Memory,
    further: Sequence[FurtherMemory],
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
                array = _strings(name, further[region - 1].array_at(memory, offset, _BYTE, (byte_size,)), shape)
            elif dtype is BYTES:
                array = _strings(name, memory[offset : offset + byte_size], shape)
            elif region:
                array = further[region - 1].array_at(memory, offset, dtype.numpy, shape)
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
    return Result(arrays, DirectExchange.path, response, overflowed, bytes_avoided)


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
