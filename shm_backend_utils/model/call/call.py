"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar

import numpy.typing as npt

from ... import dtypes
from ...errors import MissingTensorError, ModelError, shown
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.device_view import DeviceView
from ...gpu.model import DeviceUses
from ...model_spec import ModelSpec
from ...tensors.view import DIRECT, TRITON, TensorView
from ..context import SequencePart
from ..forward.direct import LentMemory, lendable
from ..forward.forwarder import CALLERS_PARAMETER
from ..forward.ordinary import Forwarding, ForwardOutputs
from .answered import AnsweredRequest
from .received import scan_json

__all__ = ["Call"]

_START: Final = 1  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END: Final = 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

Self = TypeVar("Self", bound="Call")


class Call(AnsweredRequest):
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's table says so, else in a tensor of Triton's. An output goes
    to the client's memory if the table has room for it, else back through Triton. The model need not care.

    A session takes a call through :meth:`begin`, :meth:`commit` and :meth:`end`, or :meth:`fail`. To ask for a tensor
    of a call that is over is a ClosedError.

    Attributes
    ----------
    response : InferenceResponse
        ``execute`` returns it for this request. It exists once the call was committed or has failed. After a failure it
        carries the error.
    devices : DeviceUses or None
        The GPUs that the call uses, by number; None for none. The call ends only after they have finished the work on
        the streams that :meth:`ready_on` has named, or, where none was named, all their work.
    table : Table or None
        The client's description of its memory; None if it shares none.
    outputs : dict of str to Output
        The outputs that the model has made so far.
    """

    _public_name: ClassVar = "Call"

    def __enter__(self: Self) -> Self:
        try:
            self.begin()
        except BaseException as error:
            self.fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
            return
        try:
            self._finish()
            if self.devices:
                self.devices.wait()
                self.devices.release()
        except BaseException as own:
            self.fail(own)
            raise
        self.end()

    def _finish(self) -> None:
        """Do what is to be done before GPUs are waited for, when the block is left."""
        self.commit()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<{self._public_name} {self._context.spec.name!r} path={self.path}{self._progress()} {state}>"

    def _progress(self) -> str:
        return f" outputs={list(self.outputs)}"

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and has not ended."""
        return bool(self._is_open)

    @property
    def spec(self) -> ModelSpec:
        """The model's configuration."""
        return self._context.spec

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's own parameters, without those of this package: name to str, int, float or bool. A copy."""
        parameters = self._parameters
        if parameters is None:
            text = self._request.parameters()
            parameters = self._parameters = scan_json(text, 0)[0] if text else {}
        return {name: value for name, value in parameters.items() if name != CALLERS_PARAMETER}

    @property
    def path(self) -> str:
        """``"direct"`` if the request names memory for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return TRITON if self.table is None else DIRECT

    @property
    def batch_size(self) -> int:
        """How many rows the inputs have, with a batch dimension; MissingTensorError if the request has no input."""
        if self.table is not None:
            for span in self.table.inputs.values():
                return span.shape[0]
        for tensor in self._delivered_tensors().values():
            return int(tensor.shape()[0])
        raise MissingTensorError("", "the request has no input, which would say how many rows it has")

    @property
    def inputs(self) -> dict[str, TensorView]:
        """Every input that the request has, as :meth:`input` returns it, in the order of the configuration."""
        found = {name: self.find_input(name) for name in self._context.spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    @property
    def request_id(self) -> str:
        """As the client chose it; empty if it did not."""
        return str(self._request.request_id())

    @property
    def sequence(self) -> SequencePart | None:
        """The sequence that the request is part of, for models with a sequence batcher; None if it is none."""
        correlation_id = self._request.correlation_id()
        flags = self._request.flags() if correlation_id else 0
        return SequencePart(correlation_id, bool(flags & _START), bool(flags & _END)) if correlation_id else None

    @property
    def deadline(self) -> float | None:
        """When the client's ``timeout`` is over, by ``time.monotonic()``, in seconds; None if it has set none.

        Counted from when the model got the request: how long it waited before, the server does not tell.
        """
        timeout_us = self._request.timeout()
        return self._arrived + timeout_us * 1e-6 if timeout_us else None

    @property
    def cancelled(self) -> bool:
        """Whether the client does not want the answer any more. Asks the server."""
        return bool(self._request.is_cancelled())

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output of the configuration. Others need not be computed."""
        return name in self._request.requested_output_names()

    def device_output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceView:
        """As :meth:`output`, on a GPU, wherever the client wants it; MachineError without cuda-bindings or a GPU.

        It is the client's own memory where that is on a GPU. If that is on the host, or is missing, it is memory of the
        instance's GPU, and is copied to its destination when the call ends.
        """
        view = self.output(name, shape, dtype)
        if isinstance(view, DeviceView):
            return view
        made = self._context.arrays.empty(name, view.shape, dtypes.from_numpy(view.dtype, name), TRITON)
        output = self.outputs[name]
        if output.region is None:
            self.outputs[name] = output._replace(view=made)
        else:
            self.outputs[name] = output._replace(source=made.array, was_copied=True)
        self._use_device(made.device)
        return made

    def ready_on(self, cuda_stream: Any) -> None:
        """Name a stream of a GPU that the call's work is on: the call ends only after that work is finished.

        The library's copies, as :meth:`put` makes them, follow the work that is on the stream already, and precede
        later work; so name the stream before you copy. Without a stream, the library waits for the whole GPU, at each
        copy and at the end. That is right for every model, but also waits for the process' other work there.

        Parameters
        ----------
        cuda_stream : object
            An object with ``__cuda_stream__``: a torch.cuda.Stream, a cupy.cuda.Stream; or a ``CUstream`` as a number.
            Name several one by one; then no other stream of that GPU is waited for. A default stream is that of the GPU
            that the call uses, or, if that is not one alone, of the instance's.

        Raises
        ------
        ModelError
            It is no stream; or one of a GPU that the call does not use; or it is being captured into a graph.
        MachineError
            cuda-bindings or a GPU is missing.
        """
        self._check_open()
        uses = DeviceUses(self._context.arrays) if self.devices is None else self.devices
        uses.name(cuda_stream)
        self.devices = uses

    def to_host(self, view: TensorView) -> npt.NDArray[Any]:
        """Return a tensor as an array of NumPy: a copy if it is on a GPU, after the call's work there.

        ``view`` is an input, or an output that is written; anything else is a ModelError. Where it is on the host the
        array is the same memory, valid as long as the call, and read-only for an input.
        """
        _check_is_view(view)
        if not isinstance(view, DeviceView):
            return view.numpy()
        return self._context.arrays.to_host(view, self._use_device(view.device))

    def to_device(self, view: TensorView, cuda_stream: Any = None) -> DeviceArray:
        """Return a tensor as an array on a GPU: a copy on the instance's GPU if it is on the host.

        ``view`` is an input, or an output that is written. The copy is made on ``cuda_stream``, a stream of the
        instance's GPU as :meth:`ready_on` takes it. By default it is made on a stream of the library's own, and a
        consumer by DLPack or CUDA's array interface waits for it. From pinned memory (``SHM_PIN_HOST_MEMORY``) it is
        made while the host goes on.

        ``torch.from_dlpack`` and its like take the array, and ``.cupy()``. Where the view is on a GPU already it is the
        same memory, valid as long as the call. It is a ModelError if the view is none, or the stream is of another GPU,
        or is being captured into a graph; a MachineError if cuda-bindings or a GPU is missing.
        """
        _check_is_view(view)
        if isinstance(view, DeviceView):
            array: DeviceArray = view.array
            return array
        arrays = self._context.arrays
        own = None if cuda_stream is None else arrays.instance_stream(cuda_stream)
        return arrays.to_device(view, self._device_uses(), own)

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
        the direct path. For others, and for tensors that take up to ``SHM_INLINE_BYTES`` together, this is an ordinary
        request of the Python backend (BLS).

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Name to a view, or to any value that :meth:`put` takes.
        outputs : iterable of str or mapping, optional
            The outputs wanted, one or more; all if not given. A mapping also gives a place for each: a view that
            :meth:`output` has returned, to be written to; or a number of bytes to reserve; or None.
        model_version : str, optional
            By default the server chooses.
        parameters : mapping, optional
            Of the request: str, bool or int; Triton 2.51 does not pass on a float.

        Returns
        -------
        dict of str to TensorView
            Valid as long as they live, and at most until this call ends where they lie in the client's memory. They
            are read-only, unless they are views that were given to be written to.

        Raises
        ------
        ModelError
            The model does not exist, or it is decoupled, or it has no such outputs, or it would wait for this call
            itself, or Triton does not pass on a parameter.
        TensorError
            It does not take these tensors.
        ForwardError
            It failed.
        PeerError
            Its answer contradicts its configuration, or lacks an output.
        """
        forwarding, pending = self._begin_forward(model, inputs, outputs, model_version, parameters)
        return self._context.forwarder.execute(forwarding, pending)

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
        forwarding, pending = self._begin_forward(model, inputs, outputs, model_version, parameters)
        return await self._context.forwarder.execute_async(forwarding, pending)

    def _begin_forward(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs,
        version: str,
        parameters: Mapping[str, Any] | None,
    ) -> tuple[Forwarding, set[Forwarding]]:
        if not self._is_open:
            raise self._not_open()
        if self._pending is None:
            self._pending = set()
        if self.devices:  # the other model has streams of its own
            self.devices.wait()
        own = self._parameters
        callers = "" if own is None else str(own.get(CALLERS_PARAMETER, ""))
        begin = self._context.forwarder.begin
        return begin(model, inputs, outputs, parameters or {}, version, callers, self._lendable), self._pending

    def _lendable(self) -> Sequence[LentMemory | None]:
        slot = self._slot
        if self.table is None:
            return ()
        return lendable(None if slot is None else slot.lent_claim(), self.table, self._rooms, self._memories)


def _check_is_view(value: object) -> None:
    if not isinstance(value, TensorView):
        raise ModelError(
            f"{shown(value)} is no view of a call's tensor; expected what call.input or call.output has returned; an "
            "array of model.py's own is copied by its library"
        )
