"""Triton's own shared memory: slots that are registered at the server, and calls that refer to them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES
from ..errors import PeerError, ShmError, SlotInDoubtError
from ..memory.managed import array_at
from .errors import InferenceError, MemoryRefusedError, OutputRoomError
from .exchange import Exchange, is_answer, no_strings
from .options import RequestOptions
from .plan import CallPlan
from .result import Result
from .slot import Slot
from .transport import InputTensor, OutputTensor, Place, Request, Transport

__all__ = ["RegisteredExchange", "Registrations"]

_UNKNOWN_REGION: Final = "Unable to find shared memory region"
_ALREADY_THERE: Final = "already in manager"
_IN_USE: Final = "currently in use"
_TOO_SMALL: Final = "should be at least"


class Registrations:
    """What this client has registered at the server: each slot under its own random key.

    It never unregisters anything else, and never everything at once, which would take other clients' regions away.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: set[str] = set()
        self._unwanted: set[str] = set()  # a part of these

    async def add(self, slot: Slot, timeout_s: float) -> None:
        """Register the slot if it is not.

        Raises
        ------
        MemoryRefusedError
            The server cannot open the memory, or registers none.
        """
        if slot.key in self._known:
            return
        slot.is_registered = True
        self._known.add(slot.key)  # before it is: if the answer does not come in time, it may be nevertheless
        try:
            await self._transport.register(slot.key, f"/{slot.key}", slot.byte_size, timeout_s)
        except InferenceError as error:
            if not is_answer(error):
                raise
            if _ALREADY_THERE not in str(error):  # by an earlier attempt, whose answer came too late
                self._known.discard(slot.key)
                slot.is_spoiled = True
                reason = str(error.message()).replace(slot.key, "…")
                message = f"the server does not register the call's memory: {reason}"
                raise MemoryRefusedError(message, error.status()) from None

    def forget(self, slot: Slot) -> None:
        """Take note that the server does not know the slot any more: it was restarted, or somebody unregistered it."""
        self._known.discard(slot.key)

    async def drop(self, keys: Iterable[str], timeout_s: float) -> bool:
        """Unregister those of these keys that are registered, so that the server lets go of their memory.

        What the server does not answer to, or still has a request in, is tried again the next time. Return whether
        there is a request left in one.
        """
        are_in_use = False
        self._unwanted |= self._known.intersection(keys)
        for key in list(self._unwanted):
            try:
                await self._transport.unregister(key, timeout_s)
            except ShmError as error:
                if not is_answer(error):
                    return are_in_use
                if _IN_USE in str(error):
                    are_in_use = True
                    continue
            self._unwanted.discard(key)
            self._known.discard(key)
        return are_in_use

    async def drop_all(self, timeout_s: float) -> bool:
        """Unregister every slot of this client; return as :meth:`drop`."""
        return await self.drop(list(self._known), timeout_s)


class RegisteredExchange(Exchange):
    """Tensors lie in a registered slot, from which the server copies. Nothing fences one request from the next.

    Outputs whose size is not certain before the model has run travel with the response: the server fails a request
    whose output does not fit its place, and the model must not run twice.
    """

    path = "triton-shm"

    def __init__(
        self,
        transport: Transport,
        plan: CallPlan,
        options: RequestOptions,
        slot: Slot,
        memory: npt.NDArray[np.uint8],
        registrations: Registrations,
    ) -> None:
        super().__init__(transport, plan, options)
        self._slot = slot
        self.memory = memory
        self._registrations = registrations
        self.inputs = MappingProxyType(slot.input_arrays(plan, memory) | no_strings(plan))

    async def _infer(self, timeout_s: float) -> Result:
        if self._slot.is_spoiled:
            raise SlotInDoubtError(
                "a request of this call got no answer, and the server may still write to this call's memory; prepare "
                "another call"
            )
        await self._registrations.add(self._slot, timeout_s)
        message = self._transport.encode(self._place_all())
        try:
            response = await self._send(message, timeout_s)
        except BaseException as error:
            self._slot.is_spoiled |= not is_answer(error)
            if is_answer(error) and _TOO_SMALL in str(error):
                raise OutputRoomError(
                    f"an output of model {self.plan.spec.name!r} needs more bytes than its hint gave it, and on the "
                    f"path triton-shm it cannot come back another way: {error}; give a larger hint, or none",
                ) from None
            raise
        arrays = {name: self._output(name, response) for name in self.plan.wanted}
        placed = sum(array.nbytes for name, array in arrays.items() if self._is_placed(name))
        placed += sum(span.byte_size for span in self.plan.inputs.values() if span.dtype is not BYTES)
        return Result(arrays, self.path, response, bytes_avoided=placed)

    async def _send(self, message: Any, timeout_s: float) -> Any:
        try:
            return await self._transport.infer(message, timeout_s)
        except InferenceError as error:
            if not self._does_not_know_the_slot(error):
                raise
        self._registrations.forget(self._slot)
        await self._registrations.add(self._slot, timeout_s)
        return await self._transport.infer(message, timeout_s)

    def _does_not_know_the_slot(self, error: InferenceError) -> bool:
        """Return whether the server has no such region, which it looks for before anything else runs.

        A model may say the same of regions of its own: only the server says it of this slot, and nothing else.
        """
        pattern = rf"(\[request id: [^]]*\] )?{_UNKNOWN_REGION}: '{re.escape(self._slot.key)}'"
        return re.fullmatch(pattern, str(error.message())) is not None

    def did_not_start(self, error: BaseException) -> bool:
        return isinstance(error, MemoryRefusedError)

    def _place_all(self) -> Request:
        begin = self._slot.data_offset
        inputs = [
            InputTensor(name, span.dtype.name, span.shape, self._place(begin + span.offset, span.byte_size))
            if span.byte_size and name not in self.plan.strings
            else self._tensor(name)  # the server places nothing that is empty, nor strings with room behind them
            for name, span in self.plan.inputs.items()
        ]
        outputs = []
        for name in self.plan.wanted:
            place = None
            if self._is_placed(name):
                span = self.plan.outputs[name]
                place = self._place(begin + span.offset, span.byte_size)
            outputs.append(OutputTensor(name, place))
        return self._request(inputs, outputs, {})

    def _place(self, offset: int, byte_size: int) -> Place:
        return Place(self._slot.key, offset, byte_size)

    def _is_placed(self, name: str) -> bool:
        is_strings = self.plan.spec.outputs[name].dtype is BYTES
        return name in self.plan.certain and self.plan.outputs[name].byte_size > 0 and not is_strings

    def _output(self, name: str, response: Any) -> npt.NDArray[Any]:
        described = self._transport.output_of(response, name)
        array: npt.NDArray[Any] | None = None
        if described is not None and self._is_placed(name):
            datatype, shape = described
            span = self.plan.outputs[name]
            offset = self._slot.data_offset + span.offset
            array = array_at(self.memory, offset, dtypes.BY_NAME[datatype].numpy, shape, span.byte_size)
        elif described is not None:
            array = response.as_numpy(name)
        if array is None:
            raise PeerError(f"model {self.plan.spec.name!r} answered without output {name!r}, or with too much of it")
        return array
