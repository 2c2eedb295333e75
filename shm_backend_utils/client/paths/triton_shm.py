"""Triton's own paths: tensors in the request, or in slots that are registered at the server and unregistered again."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.utils import InferenceServerException

from ...dtypes import BY_NAME, BYTES
from ...errors import ClosedError, PeerError, ShmError, SlotInDoubtError
from ...memory.managed import array_at
from ...memory.pool.slot import Memory, SlotRegion
from ...protocol.call_layout import CallLayout
from ...protocol.results import check_output, missing_output
from ...tensors.strings import Strings
from ..errors import InferenceError, MemoryRefusedError, OutputRoomError
from ..inputs.sources import Source
from ..result import Result
from ..steps import Send, Steps
from ..transports.messages import Codec, InputTensor, Place
from .call import Call, InRegion, is_answer, is_at_least, output_in

__all__ = ["IN_USE", "InlineCall", "RegisteredCall", "Registrations", "no_strings", "unregister_when_free"]


@dataclass(eq=False, repr=False)
class InlineCall(Call):
    """A call whose tensors are in the message."""

    path = "inline"

    _arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict, init=False)

    def arrays(self) -> dict[str, Any]:
        empty = {name: np.empty(each.shape, each.dtype.numpy) for name, each in self.layout.table.inputs.items()}
        self._arrays = empty | no_strings(self.layout) | self._arrays
        return dict(self._arrays)

    def write(self, given: Mapping[str, Source]) -> None:
        for name, source in given.items():
            array = self._arrays[name] = np.empty(source.shape, source.dtype.numpy)
            source.write_to(array)

    def message(self) -> Any:
        spans, inputs = self.layout.table.inputs, []
        for name, array in self._arrays.items():
            dtype = spans[name].dtype
            content = Strings.of(name, array).numpy() if dtype is BYTES else array  # else tritonclient sends str(value)
            inputs.append(InputTensor(name, dtype.name, array.shape, content))
        name, outputs = self.known.spec.name, self.layout.requested
        return self.codec.infer(name, self.settings.options, inputs=inputs, outputs=outputs)

    def result(self, answer: Any) -> Result:
        """Return a response's outputs, without those that the response lacks."""
        response, spec = self.codec.result(answer), self.known.spec
        found = {}
        for name in spec.outputs:
            described = self.codec.output_of(response, name)
            if described is None:
                continue
            check_output(spec, name, BY_NAME.get(described[0]), described[1])
            array = output_in(response, name)
            if array is not None:
                found[name] = array
        return Result(found, self.path, lambda: response, in_response=tuple(found))

    def send(self, deadline: float) -> Steps[Result]:
        message = self.message()
        if self.is_closed:  # asked last: a message of a closed call lacks the inputs
            raise ClosedError("this call")
        return (yield from self.resume((yield Send(message, deadline))))

    def resume(self, outcome: Any) -> Steps[Result]:
        """Continue the call with the answer to its request, or with the request's error."""
        yield from ()
        if isinstance(outcome, BaseException):
            raise outcome
        result = self.result(outcome)
        for name in self.layout.requested or self.known.spec.outputs:
            if name not in result.in_response:
                raise missing_output(self.known.spec.name, name)
        return result

    def close(self) -> None:
        super().close()
        self._arrays = {}


def no_strings(layout: CallLayout) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of empty strings for the inputs that are strings, for the user to fill."""
    spans = layout.table.inputs
    return {name: np.full(span.shape, b"", object) for name, span in spans.items() if span.dtype is BYTES}


_UNKNOWN_REGION: Final = "Unable to find shared memory region"
_ALREADY_THERE: Final = "already in manager"
_TOO_SMALL: Final = "should be at least"


class Registrations:
    """This client's regions at the server, each under its own random key. The client unregisters only these."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.known: set[str] = set()
        self.in_doubt: set[str] = set()  # a request that names them has no answer
        self._unwanted: set[str] = set()  # registered but no longer used; drop() takes out the keys that it unregisters

    @property
    def is_empty(self) -> bool:
        """Whether the server has no region of this client."""
        return not (self.known or self._unwanted)

    def add(self, region: SlotRegion, deadline: float) -> Steps[None]:
        """Register a region, once; MemoryRefusedError if the server cannot open it, or registers no clients' memory."""
        key = region.key
        if key in self.known:
            return
        region.is_registered = True
        self.known.add(key)  # before the request: without an answer, the region may be registered
        try:
            yield Send(self._codec.register(key, f"/{key}", region.byte_size), deadline)
        except InferenceError as error:
            if not is_answer(error):
                raise
            if _ALREADY_THERE not in str(error):  # an earlier attempt registered it, but was answered too late
                self.known.discard(key)
                region.spoil("refusal")
                reason = str(error.message()).replace(key, "…")
                message = f"the server does not register the call's memory: {reason}"
                raise MemoryRefusedError(message, error.status()) from None

    def drop(self, keys: Iterable[str] | None, deadline: float) -> Steps[bool]:
        """Unregister these keys, or all, and earlier calls' leftovers; return whether Triton < 24.12 says "in use"."""
        registered = self.known.intersection(list(self.known) if keys is None else keys)
        self._unwanted |= registered
        self.known -= registered
        mine, are_in_use = set[str](), False
        try:
            with contextlib.suppress(KeyError):  # pop raises it when the set is empty
                mine.update(iter(self._unwanted.pop, None))  # one C call, which no interrupt can split
            for key in list(mine):
                try:
                    # Before 24.09, a server unmaps memory that a request uses, and crashes: there, it stays registered.
                    if key not in self.in_doubt or (yield from is_at_least((2, 50), self._codec, deadline)):
                        yield Send(self._codec.unregister(key), deadline)
                except ShmError as error:
                    if not is_answer(error):
                        break
                    if IN_USE in str(error):
                        are_in_use = True
                        continue
                mine.discard(key)
                self.in_doubt.discard(key)
        finally:
            self._unwanted.update(mine)
        return are_in_use


@dataclass(eq=False, repr=False)
class RegisteredCall(InRegion, Call):
    """A call with numbers in a registered region, except outputs of uncertain size; it fails if one does not fit."""

    region: SlotRegion
    memory: Memory
    registrations: Registrations

    path = "triton-shm"

    def __post_init__(self) -> None:
        self._strings = no_strings(self.layout)  # the request carries them
        outputs, layout = self.known.spec.outputs, self.layout
        self._names = tuple(layout.requested or outputs)
        rooms = {name: layout.table.outputs[name] for name in self._names if name in layout.certain}
        self._placed = {  # outputs in the region
            name: Place(self.region.key, room.offset, room.byte_size)
            for name, room in rooms.items()
            if room.byte_size and outputs[name].dtype is not BYTES
        }

    def arrays(self) -> dict[str, Any]:
        return {name: self._input(self.memory, span) for name, span in self.layout.table.inputs.items()} | self._strings

    def write(self, given: Mapping[str, Source]) -> None:
        for name in self._strings.keys() & given.keys():
            given[name].write_to(self._strings[name])
        super().write({name: source for name, source in given.items() if name not in self._strings})

    def send(self, deadline: float) -> Steps[Result]:
        memory, strings = self.memory, self._strings  # kept for the request, even if the call is closed meanwhile
        self._check_is_open()
        if self.region.is_spent:
            raise SlotInDoubtError(
                "a request of this call got no answer, and the server may still write to this call's memory; prepare "
                "another call"
            )
        message, is_first, answer = self._message(strings), True, None
        while answer is None:
            yield from self.registrations.add(self.region, deadline)
            self.registrations.in_doubt.add(self.region.key)
            try:
                answer = yield Send(message, deadline)
            except BaseException as error:
                if not is_answer(error):
                    self.region.spoil("unfenced")
                    raise
                self.registrations.in_doubt.discard(self.region.key)
                if _TOO_SMALL in str(error):
                    raise OutputRoomError(
                        f"an output of model {self.known.spec.name!r} needs more bytes than its hint gave it, and on "
                        f"the path triton-shm it cannot come back another way: {error}; give a larger hint, or none"
                    ) from None
                if is_first and self._is_unknown(str(error.message())):  # checked first: no model has run
                    is_first = False
                    self.registrations.known.discard(self.region.key)
                    continue
                raise
        self.registrations.in_doubt.discard(self.region.key)
        response, arrays = self.codec.result(answer), {}
        for name in self._names:  # no comprehension: its closure would keep the memory in an error's traceback
            arrays[name] = self._output(name, response, memory)
        placed = sum(arrays[name].nbytes for name in self._placed)
        placed += sum(span.byte_size for span in self.layout.table.inputs.values() if span.dtype is not BYTES)
        in_response = tuple(name for name in arrays if name not in self._placed)
        return Result(arrays, self.path, lambda: response, bytes_avoided=placed, in_response=in_response)

    def close(self) -> None:
        super().close()
        self.memory, self._strings = np.empty(0, np.uint8), {}

    def _is_unknown(self, message: str) -> bool:
        """Return whether the server lacks this region: an error of a model names another region, or says more."""
        pattern = rf"(\[request id: [^]]*\] )?{_UNKNOWN_REGION}: '{re.escape(self.region.key)}'"
        return re.fullmatch(pattern, message) is not None

    def _message(self, strings: Mapping[str, npt.NDArray[Any]]) -> Any:
        inputs = []
        for name, (dtype, shape, _, offset, byte_size) in self.layout.table.inputs.items():
            content: Place | npt.NDArray[Any] = Place(self.region.key, offset, byte_size)
            if dtype is BYTES:  # Triton puts neither strings nor empty tensors in regions
                content = Strings.of(name, strings[name]).numpy()
            elif not byte_size:
                content = np.empty(shape, dtype.numpy)
            inputs.append(InputTensor(name, dtype.name, shape, content))
        outputs = {name: self._placed.get(name) for name in self._names}
        return self.codec.infer(self.known.spec.name, self.settings.options, inputs=inputs, outputs=outputs)

    def _output(self, name: str, response: Any, memory: Memory) -> npt.NDArray[Any]:
        described = self.codec.output_of(response, name)
        array: npt.NDArray[Any] | None = None
        if described is not None:
            (datatype, shape), room = described, self._placed.get(name)
            dtype = check_output(self.known.spec, name, BY_NAME.get(datatype), shape)
            if room is None:
                array = output_in(response, name)
            elif dtype is not BYTES:  # BYTES here only if the configuration leaves the type open
                array = array_at(memory, room.offset, dtype.numpy, shape, room.byte_size)
        if array is None:
            raise PeerError(f"model {self.known.spec.name!r} answered without output {name!r}, or it exceeds its room")
        return array


IN_USE: Final = "currently in use"
"""The answer of Triton before 24.12 when it refuses to unregister a region that a request uses."""
_ROUND_S: Final = 0.01


def unregister_when_free(unregister: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Call ``unregister`` until the server no longer says that a request uses the region; raise its other errors."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            unregister()
        except InferenceServerException as error:
            if IN_USE not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_ROUND_S)
        else:
            return
