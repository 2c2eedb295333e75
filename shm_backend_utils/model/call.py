"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MissingTensorError
from ..tensors.view import TensorView
from .device_view import DeviceView
from .forward import CALLERS_PARAMETER
from .forwarding import Forwarding
from .forwarding import Outputs as ForwardOutputs
from .incoming import SequencePart
from .plans import OrdinaryRequest
from .served import Served

__all__ = ["Call"]


class Call(Served):
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's descriptor says so, else in what Triton delivered. An output
    goes to the client's memory if the descriptor has room for it, else back through Triton. The model need not care.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    """

    __slots__ = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's parameters, without the descriptor. A copy."""
        if self._meaning is None:
            return {}
        return {name: value for name, value in self._meaning.parameters.items() if name != CALLERS_PARAMETER}

    @property
    def inputs(self) -> dict[str, TensorView]:
        """Every input that the request has, in the order of the model's configuration."""
        found = {name: self._find_input(name) for name in self._spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    def input(self, name: str) -> TensorView:
        """Return one input: a view, C-contiguous and read-only.

        Raises
        ------
        MissingTensorError
            The request does not have it.
        """
        view = self._find_input(name)
        if view is None:
            self._spec.input(name)
            notice = self._meaning.notice if isinstance(self._meaning, OrdinaryRequest) else ""
            raise MissingTensorError(name, f"the request has no input {name!r}, which the model needs{notice}")
        return view

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output, to be filled before the call ends: C-contiguous, writable, not cleared.

        It is the client's own memory where the client provided enough for it.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        return self._open_outputs().make(name, tuple(shape), np.dtype(dtype))

    def device_output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceView:
        """Return memory of a GPU for one output, to be filled before the call ends, wherever the client wants it.

        It is the client's own memory where that is on a GPU. If it is on the host, or there is none, it is memory of
        the instance's GPU, and is copied to where it belongs when the call ends.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        MachineError
            CuPy or a GPU is missing.
        """
        return self._open_outputs().make_on_device(name, tuple(shape), np.dtype(dtype))

    def put(self, name: str, array: Any) -> None:
        """Give one output. One copy into the client's memory; none if the array is memory of this call already.

        An input, or a contiguous part of one, is passed through as it is: the client then sees the output where it
        wrote the input.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        array : TensorView, numpy.ndarray, or what NumPy or DLPack can make an array of
            On the host or on a GPU, wherever the client wants the output.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        self._open_outputs().put(name, array)

    def to_host(self, view: TensorView) -> npt.NDArray[Any]:
        """Return a tensor as an array of NumPy: a copy if it is on a GPU, after what is on the current stream."""
        return self._arrays.to_host(view) if isinstance(view, DeviceView) else view.numpy()

    def to_device(self, view: TensorView, stream: Any = None) -> Any:
        """Return a tensor as an array of CuPy: a copy on the instance's GPU if it is on the host.

        Parameters
        ----------
        view : TensorView
            An input, or an output that is written.
        stream : cupy.cuda.Stream, optional
            To copy on; by default the current one. From pinned memory (``SHM_PIN_HOST_MEMORY``) the copy is made while
            the host goes on; wait for a stream of your own before the call ends.
        """
        if isinstance(view, DeviceView):
            return view.cupy()
        self._used_devices.add(self._arrays.device)
        return self._arrays.to_device(view, stream)

    @property
    def stream(self) -> Any:
        """CuPy's current stream on the instance's GPU: what is launched there is finished before the response leaves.

        What is launched on other streams is the model's own to wait for.
        """
        self._used_devices.add(self._arrays.device)
        return self._arrays.stream()

    def forward(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs = None,
        *,
        model_version: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, TensorView]:
        """Call another model of this server on the same memory, and return its outputs.

        Nothing is copied that lies in the client's memory or came from such a call before, if the other model serves
        the direct path. For others this is an ordinary request of the Python backend (BLS).

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Name to a view, or to an array on the host or on a GPU.
        outputs : sequence of str or mapping, optional
            The outputs wanted, all if not given. A mapping also says what is known of each: a view that
            :meth:`output` has returned, to be written to; or how many bytes to keep; or None.
        model_version : str, optional
            By default the server chooses.
        parameters : mapping, optional
            Of the request.

        Raises
        ------
        ModelError
            There is no such model, or it would wait for this call itself.
        TensorError
            It does not take these tensors.
        ForwardError
            It failed.
        """
        forwarding = self._begin_forward(model, inputs, outputs, model_version, parameters)
        return self._forwarder.finish(forwarding, self._backend.execute(forwarding.request))

    async def forward_async(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs = None,
        *,
        model_version: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, TensorView]:
        """As :meth:`forward`, while the event loop goes on. Await it before the call ends."""
        forwarding = self._begin_forward(model, inputs, outputs, model_version, parameters)
        self._pending.add(forwarding)
        try:
            response = await self._backend.execute_async(forwarding.request)
        except Exception:
            self._pending.discard(forwarding)
            raise
        self._pending.discard(forwarding)  # but not if it was cancelled: the other model goes on
        return self._forwarder.finish(forwarding, response)

    @property
    def request_id(self) -> str:
        """As the client chose it; empty if it did not."""
        return self._incoming.request_id

    @property
    def sequence(self) -> SequencePart | None:
        """The sequence that the request is part of, for models with a sequence batcher; None if it is none."""
        return self._incoming.sequence

    @property
    def deadline(self) -> float | None:
        """When the client's ``timeout`` is over, by ``time.monotonic()``; None if it has set none.

        Counted from when the model got the request: how long it waited before, the server does not tell.
        """
        return self._incoming.deadline

    @property
    def cancelled(self) -> bool:
        """Whether the client does not want the answer any more. Asks the server."""
        return self._incoming.is_cancelled

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed."""
        return name in self._incoming.requested

    def _begin_forward(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs,
        version: str,
        parameters: Mapping[str, Any] | None,
    ) -> Forwarding:
        self._check_open()
        if self.devices:  # the other model has streams of its own
            self._arrays.synchronize(sorted(self.devices))
        callers = "" if self._meaning is None else str(self._meaning.parameters.get(CALLERS_PARAMETER, ""))
        plan = None if self._direct is None else self._direct.plan
        return self._forwarder.begin(model, inputs, outputs, parameters or {}, version, plan, callers)
