"""A call's request on one of the paths; here the shape that they share, and the path that anybody can take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, PeerError
from ..model_spec import BATCH_CARRIER
from ..tensors.strings import Strings
from .errors import DeadlineExceededError, InferenceError
from .options import RequestOptions
from .plan import CallPlan
from .result import Result
from .transport import InputTensor, OutputTensor, Request, Transport

__all__ = ["Exchange", "InlineExchange", "is_answer", "no_strings"]

_NO_MEMORY: Final[npt.NDArray[np.uint8]] = np.empty(0, np.uint8)
_NOTHING: Final[Mapping[str, npt.NDArray[Any]]] = MappingProxyType({})


class Exchange(ABC):
    """Memory for a call's inputs, and the request that is made of them, once or many times.

    Attributes
    ----------
    path : str
    plan : CallPlan
    options : RequestOptions
    inputs : mapping of str to numpy.ndarray
        To be filled before :meth:`infer`. Not cleared.
    memory : numpy.ndarray of uint8
        A slot's whole region: when it and what is made of it are gone, the slot is given back. Empty if there is none,
        and once closed.
    """

    path: str

    def __init__(self, transport: Transport, plan: CallPlan, options: RequestOptions) -> None:
        self.plan = plan
        self.memory = _NO_MEMORY
        self.inputs: Mapping[str, npt.NDArray[Any]] = {}
        self._transport = transport
        self.options = options
        self._is_closed = False

    async def infer(self, timeout_s: float) -> Result:
        """Run the model on what is in :attr:`inputs` now. May be called again; arrays of the last result change then.

        Raises
        ------
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer. The model may still be executing, or begin to.
        SlotInDoubtError
            It may still be executing an earlier request of this call, which got no answer.
        PeerError
            The model answered, but not by this protocol.
        """
        if self._is_closed:
            raise ClosedError("this call")
        return await self._infer(timeout_s)

    def did_not_start(self, error: BaseException) -> bool:
        """Return whether it is certain that the model has not run, and will not, for the request that failed so."""
        return False

    def close(self) -> None:
        """Give the memory back, as soon as no array needs it. Twice is fine."""
        self._is_closed = True
        self.inputs = _NOTHING
        self.memory = _NO_MEMORY

    @abstractmethod
    async def _infer(self, timeout_s: float) -> Result: ...

    def _tensor(self, name: str) -> InputTensor:
        """Return an input to travel with the request."""
        array = self.inputs[name]
        if name in self.plan.strings:
            array = Strings.of(name, array).numpy()  # tritonclient would send whatever else as it prints
        return InputTensor(name, self.plan.inputs[name].dtype.name, array.shape, array)

    def _wanted(self) -> list[OutputTensor] | None:
        requested = self.plan.requested
        return None if requested is None else [OutputTensor(name) for name in requested]

    def _request(
        self, inputs: list[InputTensor], outputs: list[OutputTensor] | None, parameters: Mapping[str, Any]
    ) -> Request:
        return Request(self.plan.spec.name, inputs, outputs, parameters, self.options)

    def _carriers(self) -> list[InputTensor]:
        size = self.plan.batch_size
        return [] if size is None else [InputTensor(BATCH_CARRIER, "UINT8", (size, 0), np.empty((size, 0), np.uint8))]


class InlineExchange(Exchange):
    """Tensors travel with the request and its response: for clients anywhere, and data types of any kind."""

    path = "inline"

    def __init__(self, transport: Transport, plan: CallPlan, options: RequestOptions) -> None:
        super().__init__(transport, plan, options)
        self.inputs = MappingProxyType(
            {name: np.empty(span.shape, span.dtype.numpy) for name, span in plan.inputs.items()} | no_strings(plan)
        )

    def request(self) -> Request:
        """Return the request for what is in :attr:`inputs` now."""
        return self._request([self._tensor(name) for name in self.plan.inputs], self._wanted(), {})

    def result(self, response: Any) -> Result:
        """Return a response's outputs; those that it does not have are left out."""
        arrays = {name: response.as_numpy(name) for name in self.plan.wanted}
        return Result({name: array for name, array in arrays.items() if array is not None}, self.path, response)

    async def responses(self, patience_s: float) -> AsyncGenerator[Result, None]:
        """Send the request and return its responses as they come, each waited for so long."""
        responses = self._transport.stream(self.request(), patience_s)
        try:
            async for response in responses:
                result = self.result(response)
                if result:
                    yield result
        finally:
            await responses.aclose()

    async def _infer(self, timeout_s: float) -> Result:
        result = self.result(await self._transport.infer(self._transport.encode(self.request()), timeout_s))
        missing = set(self.plan.wanted) - set(result)
        if missing:
            raise PeerError(f"model {self.plan.spec.name!r} answered without output {min(missing)!r}")
        return result


def no_strings(plan: CallPlan) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of empty strings for the inputs that are strings, for the user to fill."""
    return {name: np.full(plan.inputs[name].shape, b"", object) for name in plan.strings}


def is_answer(error: BaseException) -> bool:
    """Return whether this is what a server answered, so that nothing of the request is under way any more."""
    return isinstance(error, InferenceError) and not isinstance(error, DeadlineExceededError)
