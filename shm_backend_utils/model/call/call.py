"""One request as ``model.py`` sees it: the same object whether or not the client shares memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar

import numpy.typing as npt

from ... import dtypes
from ...errors import MissingTensorError, ModelError, shown
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.device_view import DeviceView
from ...gpu.uses import DeviceUses
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
    """One request. A context manager: its exit commits the outputs, or fails the request if there is an exception.

    An input lies in the client's memory if the request's table says so, else in a Triton tensor. An output goes to the
    client's memory if the table has room for it, else back through Triton. Your code is the same in all cases.

    The session calls :meth:`begin`, :meth:`commit` and :meth:`end`, or :meth:`fail`. You get a ClosedError if you ask
    for a tensor after the call has ended.

    Attributes
    ----------
    response : InferenceResponse
        ``execute`` returns it for this request. It is set when the call is committed or fails. After a failure it
        carries the error.
    devices : DeviceUses or None
        The GPUs that the call uses, by number; None for none. The call ends only after each has finished the work on
        the streams that :meth:`ready_on` named there, or all its work if you named none.
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
        """Finish the call when its block ends; ``__exit__`` waits for GPUs afterwards."""
        self.commit()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<{self._public_name} {self._context.spec.name!r} path={self.path}{self._progress()} {state}>"

    def _progress(self) -> str:
        return f" outputs={list(self.outputs)}"

    @property
    def is_open(self) -> bool:
        """Whether the call has begun, and has not ended."""
        return bool(self._is_open)

    @property
    def spec(self) -> ModelSpec:
        """The model's configuration."""
        return self._context.spec

    @property
    def parameters(self) -> dict[str, Any]:
        """A copy of the request's parameters, without those of this package: name to str, int, float or bool."""
        parameters = self._parameters
        if parameters is None:
            text = self._request.parameters()
            parameters = self._parameters = scan_json(text, 0)[0] if text else {}
        return {name: value for name, value in parameters.items() if name != CALLERS_PARAMETER}

    @property
    def path(self) -> str:
        """``"direct"`` if the request names shared memory for this model, else ``"triton"``.

        A Python model cannot tell Triton's own shared memory from a request that carries its tensors.
        """
        return TRITON if self.table is None else DIRECT

    @property
    def batch_size(self) -> int:
        """The number of rows, if the model has a batch dimension; MissingTensorError if the request has no input."""
        if self.table is not None:
            for span in self.table.inputs.values():
                return span.shape[0]
        for tensor in self._tensors_in_band().values():
            return int(tensor.shape()[0])
        raise MissingTensorError("", "the request has no input, so its number of rows is unknown; send an input")

    @property
    def inputs(self) -> dict[str, TensorView]:
        """All inputs of the request, as :meth:`input` returns them, in the order of the configuration."""
        found = {name: self.find_input(name) for name in self._context.spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    @property
    def request_id(self) -> str:
        """The request's id, as the client set it; empty if it did not."""
        return str(self._request.request_id())

    @property
    def sequence(self) -> SequencePart | None:
        """The request's place in its sequence, for models with a sequence batcher; None without a sequence."""
        correlation_id = self._request.correlation_id()
        flags = self._request.flags() if correlation_id else 0
        return SequencePart(correlation_id, bool(flags & _START), bool(flags & _END)) if correlation_id else None

    @property
    def deadline(self) -> float | None:
        """When the request's ``timeout`` (ShmClient's ``queue_timeout_us``) ends, in ``time.monotonic()``; else None.

        It counts from the time when the model got the request: Triton does not tell how long the request waited before.
        """
        timeout_us = self._request.timeout()
        return self._arrived + timeout_us * 1e-6 if timeout_us else None

    @property
    def cancelled(self) -> bool:
        """Whether the client has cancelled the request. Each read asks the server."""
        return bool(self._request.is_cancelled())

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. You need not compute the others."""
        return name in self._request.requested_output_names()

    def device_output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceView:
        """Return an output as :meth:`output` does, but always on a GPU; MachineError without cuda-bindings or a GPU.

        It is the client's own memory if that is on a GPU. Otherwise it is memory of the instance's GPU, and the library
        copies it to its destination when the call ends.
        """
        view = self.output(name, shape, dtype)
        if isinstance(view, DeviceView):
            return view
        uses = self._device_uses()
        made = self._context.arrays.empty(name, view.shape, dtypes.from_numpy(view.dtype, name), TRITON, uses=uses)
        output = self.outputs[name]
        if output.region is None:
            self.outputs[name] = output._replace(view=made)
        else:
            self.outputs[name] = output._replace(source=made.array, was_copied=True)
        uses.add(made.device)
        return made

    def ready_on(self, cuda_stream: Any) -> None:
        """Name a CUDA stream that does work for this call: the call ends only after that work has finished.

        Copies by the library, for example in :meth:`put`, run after earlier work on the stream and before later work.
        So name the stream before you copy. Without a stream, the library waits for the whole GPU, at each copy and at
        the end. That is correct for every model, but it also waits for the process' other work on that GPU, and
        excludes graph captures in the process: it is a ModelError if the library finds one.

        Parameters
        ----------
        cuda_stream : object
            An object with ``__cuda_stream__``, a torch.cuda.Stream, a cupy.cuda.Stream, or a ``CUstream`` as a number.
            Name several with one call each. The library then waits for no other stream of that GPU. A default stream
            belongs to the only GPU that the call uses, or to the instance's GPU if that is not exactly one.

        Raises
        ------
        ModelError
            It is not a stream, or belongs to a GPU that the call does not use, or is being captured into a graph.
        MachineError
            cuda-bindings or a GPU is missing.
        """
        self._check_open()
        uses = DeviceUses(self._context.arrays) if self.devices is None else self.devices
        uses.name(cuda_stream)
        self.devices = uses

    def to_host(self, view: TensorView) -> npt.NDArray[Any]:
        """Return a tensor as a NumPy array. A tensor on a GPU is copied after the call's work there.

        ``view`` is an input, or an output that you have written; anything else is a ModelError. For a tensor on the
        host the array is the same memory, valid until the call ends, and read-only for an input.
        """
        _check_is_view(view)
        if not isinstance(view, DeviceView):
            return view.numpy()
        return self._context.arrays.to_host(view, self._use_device(view.device))

    def to_device(self, view: TensorView, cuda_stream: Any = None) -> DeviceArray:
        """Return a tensor as an array on a GPU. A tensor on the host is copied to the instance's GPU.

        ``view`` is an input, or an output that you have written. If it is on a GPU already, the array is the same
        memory, valid until the call ends. Otherwise the copy runs on ``cuda_stream``, a stream of the instance's GPU
        as :meth:`ready_on` takes it. By default it runs on a stream of the library, and consumers by DLPack or CUDA's
        array interface wait for it. The host does not wait for copies from pinned memory (``SHM_PIN_HOST_MEMORY``).

        Use the array with ``torch.from_dlpack`` and similar functions, or ``.cupy()``. It raises ModelError if ``view``
        is not a view, or the stream is of another GPU or being captured; MachineError without cuda-bindings or a GPU.
        """
        _check_is_view(view)
        if isinstance(view, DeviceView):
            array: DeviceArray = view.array
            return array
        arrays = self._context.arrays
        stream = None if cuda_stream is None else arrays.instance_stream(cuda_stream)
        return arrays.to_device(view, self._device_uses(), stream)

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

        If the other model serves the direct path, tensors in the client's memory, and tensors from an earlier
        ``forward``, are not copied. For other models, and for tensors of up to ``SHM_INLINE_BYTES`` in total, it makes
        an ordinary request of the Python backend (BLS).

        Parameters
        ----------
        model : str
            The other model's name.
        inputs : mapping
            Name to a view, or to any value that :meth:`put` takes.
        outputs : iterable of str or mapping, optional
            The outputs that you want, one or more; by default all. A mapping also gives a place for each: a view from
            :meth:`output` that the other model writes to, a number of bytes to reserve, or None.
        model_version : str, optional
            By default the server chooses.
        parameters : mapping, optional
            Parameters of the request: str, bool or int. Triton 2.51 does not pass on a float.

        Returns
        -------
        dict of str to TensorView
            Views in the client's memory are valid until this call ends, others as long as they live. All are read-only,
            except for views that you gave in ``outputs``.

        Raises
        ------
        ModelError
            The model does not exist, is decoupled, or lacks such an output. Or it would wait for itself, as it called
            this model. Or Triton does not pass on a parameter.
        TensorError
            The other model does not take these tensors.
        ForwardError
            The other model failed.
        PeerError
            The other model's answer contradicts its configuration, or lacks an output.
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
        """Do the same as :meth:`forward` without blocking the event loop. Await it before the call ends."""
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
        if self.devices:  # the other model's streams do not wait for this call's streams
            self.devices.wait()
        received = self._parameters
        callers = "" if received is None else str(received.get(CALLERS_PARAMETER, ""))
        begin = self._context.forwarder.begin
        own, uses = self._lendable, self.devices
        return begin(model, inputs, outputs, parameters or {}, version, callers, own, uses), self._pending

    def _lendable(self) -> Sequence[LentMemory | None]:
        slot = self._slot
        if self.table is None:
            return ()
        return lendable(None if slot is None else slot.lent_claim(), self.table, self._rooms, self._memories)


def _check_is_view(value: object) -> None:
    if not isinstance(value, TensorView):
        raise ModelError(
            f"{shown(value)} is not a view of a call's tensor; expected a view from call.input or call.output; copy an "
            "array of your own with its array library"
        )
