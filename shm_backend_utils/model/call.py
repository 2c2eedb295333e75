"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES
from ..errors import BatchSizeError, ClosedError, MissingTensorError, ModelError, ShmError
from ..region.cuda_events import Event
from ..spec import BATCH_CARRIER
from ..strings import Strings
from ..strings_view import StringsView
from ..view import TensorView
from .completion import Completion
from .device_view import DeviceView
from .direct import DirectPlan, DirectTensors
from .forward import CALLERS_PARAMETER
from .forwarding import Forwarding
from .forwarding import Outputs as ForwardOutputs
from .instance import Instance
from .outputs import TRITON, Outputs
from .places import DIRECT, Output
from .plans import DirectRequest, OrdinaryRequest

__all__ = ["Call"]


class Call:
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's descriptor says so, else in what Triton delivered. An output
    goes to the client's memory if the descriptor has room for it, else back through Triton. The model need not care.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    """

    __slots__ = (
        "_arrays",
        "_backend",
        "_completion",
        "_delivered",
        "_direct",
        "_forwarder",
        "_generation",
        "_is_on_devices",
        "_is_open",
        "_meaning",
        "_outputs",
        "_pending",
        "_plans",
        "_request",
        "_requested",
        "_results",
        "_spec",
        "_used_devices",
        "response",
    )

    def __init__(self, instance: Instance, request: Any, completion: Completion | None = None) -> None:
        self.response: Any = None
        self._spec, self._backend, self._plans, self._arrays, self._forwarder = instance
        self._used_devices: set[int] = set()
        self._completion = completion
        self._request = request
        self._meaning: OrdinaryRequest | DirectRequest | None = None
        self._delivered: dict[str, Any] | None = None
        self._requested: Collection[str] | None = None
        self._outputs: Outputs | None = None
        self._is_on_devices = False
        self._direct: DirectTensors | None = None
        self._results = b""
        self._generation = 0
        self._pending = 0
        self._is_open = False

    @property
    def devices(self) -> set[int]:
        """The GPUs that this call uses. It is not over before they have done what is on their current streams."""
        return self._used_devices if self._outputs is None else self._used_devices | self._outputs.devices

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's parameters, without the descriptor. A copy."""
        if self._meaning is None:
            return {}
        return {name: value for name, value in self._meaning.parameters.items() if name != CALLERS_PARAMETER}

    @property
    def path(self) -> str:
        """``"direct"`` if the request has a descriptor for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return DIRECT if isinstance(self._meaning, DirectRequest) else TRITON

    @property
    def direct_plan(self) -> DirectPlan | None:
        """What its descriptor means; None if it has none."""
        return None if self._direct is None else self._direct.plan

    @property
    def batch_size(self) -> int:
        """How many rows its inputs have. For models with a batch dimension."""
        if self._direct is not None and self._direct.plan.inputs:
            return next(iter(self._direct.plan.inputs.values())).shape[0]
        return int(next(iter(self._delivered_tensors().values())).shape()[0])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Names, data types and shapes of its inputs, but for their rows: equal for requests that make one batch."""
        kind = () if self._direct is None else self._direct.plan.kind
        if len(kind) == len(self._spec.inputs):
            return kind
        views = [view for name, view in self.inputs.items() if self._direct is None or view.path != DIRECT]
        return (*kind, *[(view.name, view.triton_dtype, view.shape[1:]) for view in views])

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
        self._pending += 1
        try:
            response = await self._backend.execute_async(forwarding.request)
        finally:
            self._pending -= 1
        return self._forwarder.finish(forwarding, response)

    @property
    def cancelled(self) -> bool:
        """Whether the client does not want the answer any more. Asks the server."""
        return bool(self._request.is_cancelled())

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed."""
        return name in self._requested_names()

    def __enter__(self) -> Call:
        self._meaning, generation = self._plans.begin(self._backend.parameters(self._request))
        self._generation = generation
        if isinstance(self._meaning, DirectRequest):
            plan = self._meaning.direct
            try:
                self._check_batch_size(plan)
                self._direct = DirectTensors(plan, generation)
                self._used_devices.update(plan.devices)
            except BaseException:
                self._plans.end(plan)
                raise
        self._outputs = self._first_outputs()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending:
            self._abandon()
            if error is None:
                raise ModelError(
                    f"model.py has left the call while {self._pending} calls of forward_async were under way; await "
                    "them before"
                )
            return
        if error is not None:
            self._fail()
            return
        try:
            self._respond()
            if self.devices and self._completion is None:
                self._arrays.synchronize(sorted(self.devices))
        except BaseException:
            self._fail()
            raise
        self._is_open = False
        if self.devices and self._completion is not None:
            self._completion.add(self)
        else:
            self.end()

    @property
    def can_end_by_event(self) -> bool:
        """Whether all that the client looks at is on GPUs, so that it can wait for an event itself."""
        if self._direct is None or not self._direct.plan.slots or not self._direct.has_room_for_events(self._results):
            return False
        return self._is_on_devices

    def end(self, events: Sequence[Event] = ()) -> None:
        """Write the results. From here on the memory may be the client's, when it has waited for the events.

        Only :class:`Completion` calls this.
        """
        self._is_open = False
        if self._direct is not None:
            self._direct.complete(self._results, events)
            self._plans.end(self._direct.plan)

    def end_by(self, error: Exception) -> None:
        """Fail the call after the model has left it. Only :class:`Completion` calls this."""
        self.response = self._backend.error_response(error)
        self._fail()

    def _first_outputs(self) -> Outputs | None:
        return Outputs(self._spec, self._arrays, None if self._direct is None else self._direct.plan.places)

    def _respond(self) -> None:
        outputs = self._open_outputs().finish(self._requested_names())
        tensors = self._tensors(outputs)
        response = self._backend.response(tensors)
        if self._direct is not None:
            self._results = self._direct.plan.places.results(outputs)
            self._is_on_devices = all(isinstance(output.view, DeviceView) for output in outputs) and not tensors
        self.response = response

    def _tensors(self, outputs: Iterable[Output]) -> list[Any]:
        """Return those outputs as tensors that go back through Triton."""
        return [self._tensor(output.view) for output in outputs if not output.is_delivered]

    def _tensor(self, view: TensorView) -> Any:
        if isinstance(view, StringsView) and self._direct is not None:
            return self._backend.output(view.name, view.strings().encoded)  # their shape is in the results
        if not isinstance(view, DeviceView):
            return self._backend.output(view.name, view.numpy())
        if self._direct is not None:  # it found no room, and travels with the response
            return self._backend.output(view.name, self._arrays.to_host(view))
        return self._backend.device_output(view.name, view.__dlpack__(stream=-1))

    def _requested_names(self) -> Collection[str]:
        if self._requested is None:
            self._requested = self._request.requested_output_names()
        return self._requested

    def _fail(self) -> None:
        self._is_open = False
        if self._direct is not None:
            try:
                self._wait_quietly()  # the memory is the client's after this, and the device may be writing there
                self._direct.fail()
            finally:
                self._plans.end(self._direct.plan)

    def _abandon(self) -> None:
        """End the call while another model may be at work on its memory: the client finds out when that is over."""
        self._is_open = False
        if self._direct is not None:
            self._direct.abandon()
            self._plans.end(self._direct.plan)

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

    def _wait_quietly(self) -> None:
        if self.devices:
            with contextlib.suppress(ShmError):
                self._arrays.synchronize(sorted(self.devices))

    def _find_input(self, name: str) -> TensorView | None:
        self._check_open()
        if self._direct is not None:
            view = self._direct.plan.inputs.get(name)
            if view is not None:
                return view
        tensor = self._delivered_tensors().get(name)
        if tensor is None or name == BATCH_CARRIER:
            return None
        if not tensor.is_cpu():
            return self._device_input(name, tensor)
        spec = self._spec.inputs.get(name)
        array = self._backend.input(tensor, None if spec is None else spec.dtype).view()
        if array.dtype == BYTES.numpy:
            return StringsView(name, Strings.of(name, array), TRITON)
        array.flags.writeable = False
        return TensorView(name, array, dtypes.from_numpy(array.dtype, name), TRITON)

    def _device_input(self, name: str, tensor: Any) -> TensorView:
        array = self._arrays.adopt(tensor.to_dlpack())
        dtype = dtypes.from_numpy(np.dtype(array.dtype), name)
        view = self._arrays.view(name, array, dtype, TRITON, writable=False)
        self._used_devices.add(view.device)
        return view

    def _delivered_tensors(self) -> dict[str, Any]:
        if self._delivered is None:
            self._delivered = {tensor.name(): tensor for tensor in self._request.inputs()}
        return self._delivered

    def _check_batch_size(self, direct: DirectPlan) -> None:
        """Raise unless the descriptor's inputs have as many rows as Triton's batcher was told."""
        if self._spec.max_batch_size == 0:
            return
        carrier = self._delivered_tensors().get(BATCH_CARRIER)
        batch_size = None if carrier is None else carrier.shape()[0]
        for name, view in direct.inputs.items():
            if view.shape[0] != batch_size:
                raise BatchSizeError(
                    name,
                    f"tensor {name!r} has a batch of {view.shape[0]}, but the request has {_batch(batch_size)}; "
                    f"send input {BATCH_CARRIER!r} with shape [{view.shape[0]}, 0]",
                )

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("this call")

    def _open_outputs(self) -> Outputs:
        if self._outputs is None or not self._is_open:
            raise ClosedError("this call")
        return self._outputs


def _batch(batch_size: int | None) -> str:
    return "none" if batch_size is None else f"one of {batch_size}"
