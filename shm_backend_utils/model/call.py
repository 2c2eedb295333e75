"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import BatchSizeError, ClosedError, MissingTensorError, ModelError, ShmError, TensorError
from ..spec import BATCH_CARRIER, ModelSpec
from ..view import TensorView
from .completion import Completion
from .device_arrays import DeviceArrays, is_on_device
from .device_view import DeviceView
from .direct import PATH as DIRECT
from .direct import DirectPlan, DirectTensors, Output
from .plans import DirectRequest, OrdinaryRequest, Plans
from .triton import TritonBackend

__all__ = ["Call"]

TRITON: Final = "triton"


class Call:
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's descriptor says so, else in what Triton delivered. An output
    goes to the client's memory if the descriptor has room for it, else back through Triton. The model need not care.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    devices : set of int
        The GPUs that this call uses. It is not over before they have done what is on their current streams.
    """

    __slots__ = (
        "_arrays",
        "_backend",
        "_completion",
        "_delivered",
        "_direct",
        "_meaning",
        "_open",
        "_plans",
        "_request",
        "_requested",
        "_results",
        "_spec",
        "_written",
        "devices",
        "response",
    )

    def __init__(
        self,
        spec: ModelSpec,
        backend: TritonBackend,
        plans: Plans,
        arrays: DeviceArrays,
        request: Any,
        completion: Completion | None = None,
    ) -> None:
        self.response: Any = None
        self.devices: set[int] = set()
        self._arrays = arrays
        self._completion = completion
        self._spec = spec
        self._backend = backend
        self._plans = plans
        self._request = request
        self._meaning: OrdinaryRequest | DirectRequest | None = None
        self._delivered: dict[str, Any] | None = None
        self._requested: Collection[str] | None = None
        self._written: dict[str, Output] = {}
        self._direct: DirectTensors | None = None
        self._results = b""
        self._open = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's parameters, without the descriptor. A copy."""
        return {} if self._meaning is None else dict(self._meaning.parameters)

    @property
    def path(self) -> str:
        """``"direct"`` if the request has a descriptor for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return DIRECT if isinstance(self._meaning, DirectRequest) else TRITON

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
        shape, dtype = tuple(shape), np.dtype(dtype)
        self._check_open()
        output = None if self._direct is None else self._direct.plan.known_output(name, shape, dtype)
        if output is None:
            output = self._make_output(name, shape, self._check_output(name, dtype, shape))
        self._written[name] = output
        return output.view

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
        view = self.output(name, shape, dtype)
        if isinstance(view, DeviceView):
            return view
        made = self._arrays.empty(name, view.shape, dtypes.from_numpy(view.dtype, name), TRITON)
        output = self._written[name]
        self._written[name] = Output(made) if output.place is None else Output(view, output.place, made)
        self.devices.add(made.device)
        return made

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
        self._check_open()
        source = self._array_of(array)
        dtype = self._check_output(name, np.dtype(source.dtype), tuple(source.shape))
        output = None
        if self._direct is not None:
            plan = self._direct.plan
            output = plan.pass_through(name, dtype, source)
            if output is None:
                output = plan.output(name, tuple(source.shape), dtype)
                if output is not None:
                    self._fill(output.view, source)
        self._written[name] = output or self._kept(name, source, dtype)

    def to_host(self, view: TensorView) -> npt.NDArray[Any]:
        """Return a tensor as an array of NumPy: a copy if it is on a GPU, after what is on the current stream."""
        return self._arrays.to_host(view) if isinstance(view, DeviceView) else view.numpy()

    def to_device(self, view: TensorView) -> Any:
        """Return a tensor as an array of CuPy: a copy on the instance's GPU if it is on the host."""
        if isinstance(view, DeviceView):
            return view.cupy()
        self.devices.add(self._arrays.device)
        return self._arrays.to_device(view)

    @property
    def stream(self) -> Any:
        """CuPy's current stream on the instance's GPU: what is launched there is finished before the response leaves.

        What is launched on other streams is the model's own to wait for.
        """
        self.devices.add(self._arrays.device)
        return self._arrays.stream()

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed."""
        return name in self._requested_names()

    def __enter__(self) -> Call:
        self._meaning, generation = self._plans.begin(self._backend.parameters(self._request))
        if isinstance(self._meaning, DirectRequest):
            plan = self._meaning.direct
            try:
                self._check_batch_size(plan)
                self._direct = DirectTensors(plan, generation)
                self.devices.update(plan.devices)
            except BaseException:
                self._plans.end(plan)
                raise
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._open = False
        if self.devices and self._completion is not None:
            self._completion.add(self)
        else:
            self.end()

    def end(self) -> None:
        """Write the results. From here on the memory may be the client's. Only :class:`Completion` calls this."""
        self._open = False
        if self._direct is not None:
            self._direct.complete(self._results)
            self._plans.end(self._direct.plan)

    def end_by(self, error: Exception) -> None:
        """Fail the call after the model has left it. Only :class:`Completion` calls this."""
        self.response = self._backend.error_response(error)
        self._fail()

    def _respond(self) -> None:
        tensors, outputs = [], self._outputs()
        for output in outputs:
            if output.source is not None:
                self._fill(output.view, output.source.array)
            elif output.place is None:
                tensors.append(self._tensor(output.view))
        response = self._backend.response(tensors)
        if self._direct is not None:
            self._results = self._direct.plan.results(outputs)
        self.response = response

    def _outputs(self) -> list[Output]:
        """Return the outputs that the client wants; raises ModelError if the model has not made one."""
        outputs, requested = [], self._requested_names()
        for name in self._spec.outputs:
            if name in requested:
                output = self._written.get(name)
                if output is None:
                    raise ModelError(f"output {name!r} was requested, but model.py wrote none")
                outputs.append(output)
        return outputs

    def _tensor(self, view: TensorView) -> Any:
        if isinstance(view, DeviceView):
            return self._backend.device_output(view.name, view.__dlpack__(stream=-1))
        return self._backend.output(view.name, view.numpy())

    def _requested_names(self) -> Collection[str]:
        if self._requested is None:
            self._requested = self._request.requested_output_names()
        return self._requested

    def _fail(self) -> None:
        self._open = False
        if self._direct is not None:
            try:
                self._wait_quietly()  # the memory is the client's after this, and the device may be writing there
                self._direct.fail()
            finally:
                self._plans.end(self._direct.plan)

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
        array = self._backend.input(tensor).view()
        array.flags.writeable = False
        return TensorView(name, array, dtypes.from_numpy(array.dtype, name), TRITON)

    def _device_input(self, name: str, tensor: Any) -> TensorView:
        array = self._arrays.adopt(tensor.to_dlpack())
        dtype = dtypes.from_numpy(np.dtype(array.dtype), name)
        view = self._arrays.view(name, array, dtype, TRITON, writable=False)
        self.devices.add(view.device)
        return view

    def _array_of(self, value: Any) -> Any:
        """Return what a user gives as an array of NumPy, or of CuPy if it is on a GPU."""
        if isinstance(value, TensorView):
            return value.array
        return self._arrays.adopt(value) if is_on_device(value) else np.asarray(value)

    def _fill(self, view: TensorView, source: Any) -> None:
        """Copy an array of NumPy or CuPy to a view, unless it is that very memory."""
        if isinstance(source, np.ndarray) and not isinstance(view, DeviceView):
            if not _is_same_memory(view, source):
                np.copyto(view.numpy(), source)
            return
        self.devices.add(self._arrays.copy(view, source))

    def _kept(self, name: str, array: Any, dtype: DType) -> Output:
        """Return an output that goes back through Triton."""
        if isinstance(array, np.ndarray):
            contiguous = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a scalar one-dimensional
            return Output(TensorView(name, contiguous, dtype, TRITON))
        view = self._arrays.view(name, array, dtype, TRITON, writable=True)
        self.devices.add(view.device)
        return Output(view)

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

    def _make_output(self, name: str, shape: tuple[int, ...], dtype: DType) -> Output:
        output = None if self._direct is None else self._direct.plan.output(name, shape, dtype)
        return output or self._kept(name, np.empty(shape, dtype.numpy), dtype)

    def _check_output(self, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
        try:
            dtype = dtypes.from_numpy(numpy_dtype, name)
            self._spec.output(name).check(dtype, shape)
        except TensorError as error:
            raise ModelError(f"model.py wrote an output that it may not: {error}") from None
        return dtype

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this call")


def _batch(batch_size: int | None) -> str:
    return "none" if batch_size is None else f"one of {batch_size}"


def _is_same_memory(view: TensorView, source: npt.NDArray[Any]) -> bool:
    return bool(source.flags.c_contiguous) and view.numpy().ctypes.data == source.ctypes.data
