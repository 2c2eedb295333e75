"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from json.scanner import make_scanner
from operator import index
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES, DType
from ..errors import (
    ClosedError,
    MissingTensorError,
    ModelError,
    RegionGoneError,
    ReplayedRequestError,
    ShmError,
    TableError,
    TensorError,
)
from ..model_spec import BATCH_CARRIER, ModelSpec
from ..protocol import results
from ..protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address, parse_generation
from ..protocol.claims import RegionClaim
from ..protocol.named import PARAMETER as DESCRIPTOR_PARAMETER
from ..protocol.named import parse_descriptor
from ..protocol.results import Event, OutputPlace
from ..protocol.spans import InputSpan, OutputSpan, Ring, Table
from ..tensors.device_view import DeviceView
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import DIRECT, TRITON, TensorView
from .admission import check_batch_size, check_direct_is_served, check_table, shares_no_memory
from .context import Context, SequencePart, sequence_of
from .delivered import DeliveredView
from .forward import CALLERS_PARAMETER, Forwarding, ForwardOutputs, LentMemory
from .mapping.mapped import PATIENCE_S, Slot, stale
from .mapping.memory import HostMemory, Memory
from .mapping.resolver import FurtherRegions
from .outputs import (
    Output,
    array_of,
    check_output,
    copy_on_host,
    in_response,
    may_not_write,
    passed_through,
    view_at,
    write_strings,
)

__all__ = ["Call"]

_OURS: Final = "shm_"  # the parameters of this package begin so
_EVENT_LENGTH: Final = 80
_NO_MEMORY: Final = HostMemory(np.empty(0, np.uint8))  # region 0 of a request without a slot; no span is in it

# What a named tuple's own constructor does, without the function around it.
_place: Final[Callable[[type[OutputPlace], tuple[Any, ...]], OutputPlace]] = tuple.__new__
_output: Final[Callable[[type[Output], tuple[Any, ...]], Output]] = tuple.__new__

_scan_json: Final = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # whose type is not that of its name

Self = TypeVar("Self", bound="Call")


class Call:
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's table says so, else in what Triton delivered. An output goes
    to the client's memory if the table has room for it, else back through Triton. The model need not care.

    A session takes a call through :meth:`begin`, :meth:`commit` and :meth:`end`, or :meth:`fail`.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed, or has failed: then it carries the
        error.
    devices : set of int or None
        The GPUs that the call uses; None for none. It is not over before they have done what is on their current
        streams.
    table : Table or None
        What the client says of its memory; None if it shares none.
    outputs : dict of str to Output
        What the model has made so far.
    """

    __slots__ = (
        "_arrived",
        "_context",
        "_further",
        "_generation",
        "_is_open",
        "_memories",
        "_notice",
        "_parameters",
        "_pending",
        "_places",
        "_request",
        "_results",
        "_rooms",
        "_slot",
        "_tensors",
        "devices",
        "outputs",
        "response",
        "table",
    )

    def __init__(self, context: Context, request: Any) -> None:
        self._arrived = time.monotonic()
        self._context = context
        self._request = request
        self._is_open = False
        self._parameters: dict[str, Any] | None = None
        self._tensors: dict[str, Any] | None = None
        self._notice = ""
        self._slot: Slot | None = None
        self._generation = 0
        self._further: FurtherRegions | None = None
        self._memories: Sequence[Memory] = ()
        self._pending: set[Forwarding] | None = None
        self._rooms: Mapping[str, OutputSpan] = {}
        self._places: list[OutputPlace] = []
        self._results = results.NO_RESULTS
        self.table: Table | None = None
        self.outputs: dict[str, Output] = {}
        self.devices: set[int] | None = None
        self.response: Any = None

    # From begin to end

    def begin(self, patience_s: float = PATIENCE_S) -> None:
        """Take the request in: from here on its slot, if it names one, is this call's.

        Parameters
        ----------
        patience_s : float
            How long to wait for a slot that somebody else holds.

        Raises
        ------
        ShmError
            The request cannot be served. Nothing is held then.
        """
        text = self._request.parameters()
        if _OURS in text:
            parameters = self._parameters = _scan_json(text, 0)[0]
            address = parameters.pop(SLOT_PARAMETER, None)
            generation = parameters.pop(GENERATION_PARAMETER, None)
            slot = self._context.slots.get(address) or self._find_slot(address)
            if slot is not None:
                if type(generation) is not int or generation < 1:
                    parse_generation(generation)
                try:
                    table = slot.claim(generation, patience_s)
                except RegionGoneError:
                    slot = self._find_slot_anew(slot, address)
                    table = slot.claim(generation, patience_s)
                self._slot = slot
                self._generation = generation
                try:
                    self._memories = (slot.memory,)
                    if table.regions or table.ring is not None:
                        self._open_more(table)
                    if self._context.spec.max_batch_size and table.inputs:
                        check_batch_size(table, self._carried_batch_size())
                    check_table(self._context.spec, table, self._memories)
                    if DESCRIPTOR_PARAMETER in parameters:
                        self._begin_named(parameters.pop(DESCRIPTOR_PARAMETER))
                    if not slot.record.start(generation):
                        raise ReplayedRequestError(
                            "request parameter shm_generation was executed before: every request needs a generation "
                            "of its own"
                        )
                except BaseException:
                    self._release()
                    raise
                self.table = table
                self._rooms = table.outputs
            elif DESCRIPTOR_PARAMETER in parameters:
                self._begin_named(parameters.pop(DESCRIPTOR_PARAMETER))
        if self.table is None and not self._context.takes_delivered:
            raise shares_no_memory(self._context.spec)
        self._is_open = True

    def commit(self, *, needs_all: bool = True) -> None:
        """Bring the outputs to their places, or on their way there, and make the response. The call goes on.

        Parameters
        ----------
        needs_all : bool
            Whether every output that the client wants must be there.

        Raises
        ------
        ModelError
            An output is missing; or something of the call is still under way.
        """
        if self._pending:
            self._check_nothing_is_pending()
        context = self._context
        requested = self._request.requested_output_names()
        places: list[OutputPlace] = []
        tensors: list[Any] = []
        for name in context.spec.outputs:
            if name in requested:
                output = self.outputs.get(name)
                if output is not None:
                    place, view, source, _ = output
                    if source is not None:
                        self._fill(view, source)
                    if type(view) is DeliveredView:
                        tensors.append(context.backend.pass_on(name, view.tensor))
                    elif place.is_in_response:
                        tensors.append(self._tensor(name, view))
                    places.append(place)
                elif needs_all:
                    raise ModelError(f"output {name!r} was requested, but model.py wrote none")
        if self._slot is not None:
            encoded = results.encode(places)
            if len(encoded) > self._slot.record.results_room:
                room = self._slot.record.results_room
                found = f"{len(encoded)} bytes for the results of {len(places)} outputs"
                expected = (
                    f"at most {room}, as the slot's record has room for; make larger ones, or ask for less at once"
                )
                raise TableError("record", found, expected)
            self._results = encoded
            self._places = places
        self.response = context.backend.response(tensors)

    def end(self, events: Sequence[Event] = ()) -> None:
        """Write the results. From here on the memory may be the client's, when it has waited for the events.

        Parameters
        ----------
        events : sequence of Event
            What the GPU has still to reach; none if it is done.
        """
        self._is_open = False
        slot = self._slot
        if slot is not None:
            encoded = results.encode(self._places, events) if events else self._results
            self._slot = None
            try:
                slot.record.complete(self._generation, encoded)
            finally:
                slot.lease.give_back()
        if self._further is not None:
            self._further.release()
            self._further = None
        self._memories = ()

    def fail(self, error: BaseException) -> None:
        """End the call by an error: its response tells the client, whose memory is its own again.

        Parameters
        ----------
        error : BaseException
            Its text goes to the client; one of :class:`ShmError` with its code.
        """
        try:
            self.response = self._context.backend.error_response(error)
        finally:
            self._abort()

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
            self.commit()
            if self.devices:
                self._context.arrays.synchronize(sorted(self.devices))
        except BaseException as own:
            self.fail(own)
            raise
        self.end()

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and has not ended."""
        return self._is_open

    @property
    def can_end_by_event(self) -> bool:
        """Whether all that the client looks at is on GPUs, so that it can wait for an event itself."""
        if self._slot is None or not self.devices:
            return False
        if any(place.is_in_response or self._memories[place.region].device is None for place in self._places):
            return False
        length = len(self._results) + _EVENT_LENGTH * len(self.devices)
        return length <= self._slot.record.results_room

    # What the model asks

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's own parameters, without those of this package: name to str, int, float or bool. A copy."""
        parameters = self._parameters
        if parameters is None:
            text = self._request.parameters()
            parameters = self._parameters = _scan_json(text, 0)[0] if text else {}
        return {name: value for name, value in parameters.items() if name != CALLERS_PARAMETER}

    @property
    def path(self) -> str:
        """``"direct"`` if the request names memory for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return TRITON if self.table is None else DIRECT

    @property
    def batch_size(self) -> int:
        """How many rows the inputs have. For models with a batch dimension.

        Raises
        ------
        MissingTensorError
            There is no input.
        """
        if self.table is not None:
            for span in self.table.inputs.values():
                return span.shape[0]
        for tensor in self._delivered_tensors().values():
            return int(tensor.shape()[0])
        raise MissingTensorError("", "the request has no input, which would say how many rows it has")

    @property
    def inputs(self) -> dict[str, TensorView]:
        """Every input that the request has, as :meth:`input` returns it, in the order of the configuration.

        Raises
        ------
        ClosedError
            The call is over.
        """
        found = {name: self.find_input(name) for name in self._context.spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    def input(self, name: str) -> TensorView:
        """Return one input.

        Parameters
        ----------
        name : str
            As in the model's configuration.

        Returns
        -------
        TensorView
            C-contiguous and read-only, of the shape and dtype that the client gave it: over the client's own memory, or
            over what Triton delivered. Arrays made from it keep the memory mapped; but after the call it may serve
            another request.

        Raises
        ------
        MissingTensorError
            The request does not have it.
        TensorNameError
            The model's configuration does not have it.
        ClosedError
            The call is over.
        """
        if not self._is_open:
            raise ClosedError("this call")
        table = self.table
        if table is not None:
            span = table.inputs.get(name)
            if span is not None:
                dtype, shape, region, offset, byte_size = span
                memory = self._memories[region]
                if type(memory) is HostMemory and dtype is not BYTES:
                    array: npt.NDArray[Any] = np.ndarray(shape, dtype.numpy, memory.read_only, memory.begin + offset)
                    return TensorView(name, array, dtype, DIRECT, memory.memory_type)
                place = OutputPlace(name, dtype, shape, region, offset, byte_size, False)
                return view_at(self._memories, place, writable=False)
        view = self._delivered(name)
        if view is None:
            self._context.spec.input(name)
            message = f"the request has no input {name!r}, which the model needs{self._notice}"
            raise MissingTensorError(name, message)
        return view

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output, to be filled before the call ends.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        shape : sequence of int
            With the batch dimension, where the model has one. Integers of NumPy are fine.
        dtype : numpy.dtype or what makes one
            Not of strings: use :meth:`put`.

        Returns
        -------
        TensorView
            C-contiguous and writable, not cleared: what an earlier request left is there until it is written over. It
            is the client's own memory where the client provided enough; else memory of this process, which goes back
            through Triton. On a GPU, if the client wants it there. Not to be written to after the call.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        ClosedError
            The call is over.
        """
        if not self._is_open:
            raise ClosedError("this call")
        shape = tuple(map(index, shape))
        numpy_dtype = np.dtype(dtype)
        tensor = self._context.spec.outputs.get(name)
        row = None if tensor is None else tensor.dtype
        if tensor is None or row is None or row is BYTES or row.numpy != numpy_dtype:
            row = check_output(self._context.spec, name, numpy_dtype, shape)
            if row is BYTES:
                raise ModelError(f"output {name!r} holds strings, of which nobody knows the size yet; use call.put()")
        elif len(shape) != len(tensor.shape) or not tensor.takes_any_size or min(shape, default=0) < 0:
            try:
                tensor.check_shape(shape)
            except TensorError as error:
                raise may_not_write(error) from None
        span = self._rooms.get(name)
        if span is not None:
            region, offset, room = span
            byte_size = math.prod(shape) * row.itemsize
            if byte_size <= room:
                place = _place(OutputPlace, (name, row, shape, region, offset, byte_size, False))
                memory = self._memories[region]
                if type(memory) is HostMemory:
                    array: npt.NDArray[Any] = np.ndarray(shape, numpy_dtype, memory.array, memory.begin + offset)
                    view = TensorView(name, array, row, DIRECT, memory.memory_type)
                else:
                    view = view_at(self._memories, place, writable=True)
                self.outputs[name] = _output(Output, (place, view, None, False))
                return view
        return self._answer_in_band(name, row, np.empty(shape, numpy_dtype)).view

    def device_output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceView:
        """Return memory of a GPU for one output, to be filled before the call ends, wherever the client wants it.

        Parameters
        ----------
        name, shape, dtype
            As of :meth:`output`.

        Returns
        -------
        DeviceView
            C-contiguous and writable. It is the client's own memory where that is on a GPU. If it is on the host, or
            there is none, it is memory of the instance's GPU, and is copied to where it belongs when the call ends.

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
        made = self._context.arrays.empty(name, view.shape, dtypes.from_numpy(view.dtype, name), TRITON)
        output = self.outputs[name]
        if output.place.is_in_response:
            self.outputs[name] = output._replace(view=made)
        else:
            self.outputs[name] = output._replace(source=made.array, was_copied=True)
        self._use_device(made.device)
        return made

    def put(self, name: str, array: Any) -> None:
        """Give one output. One copy into the client's memory; none if the array is memory of this call already.

        An input, or a contiguous part of one, is passed through as it is: the client then sees the output where it
        wrote the input.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        array : TensorView, Strings, numpy.ndarray, or what NumPy or DLPack can make an array of
            On the host or on a GPU, wherever the client wants the output. Of strings: bytes, or str, which becomes
            UTF-8.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        if not self._is_open:
            raise ClosedError("this call")
        spec = self._context.spec
        if type(array) is DeliveredView and name not in self._rooms:  # as it came, so it goes
            dtype = check_output(spec, name, array.dtype, array.shape)
            place = _place(OutputPlace, (name, dtype, array.shape, 0, 0, 0, True))
            self.outputs[name] = _output(Output, (place, array, None, True))
            return
        if isinstance(array, StringsView):
            array = array.strings()
        if isinstance(array, Strings):
            self._put_strings(name, array)
            return
        source = array_of(spec, self._context.arrays, name, array)
        shape = tuple(source.shape)
        dtype = check_output(spec, name, np.dtype(source.dtype), shape)
        if dtype is BYTES:
            self._put_strings(name, Strings.of(name, source))
            return
        output = self._passed_through(name, dtype, source, shape)
        if output is None:
            span = self._rooms.get(name)
            byte_size = math.prod(shape) * dtype.itemsize
            if span is not None and byte_size <= span.byte_size:
                place = OutputPlace(name, dtype, shape, span.region, span.offset, byte_size, False)
                view = view_at(self._memories, place, writable=True)
                output = Output(place, view, was_copied=self._fill(view, source))
        if output is None:
            self._answer_in_band(name, dtype, source)
        else:
            self.outputs[name] = output

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed.

        Parameters
        ----------
        name : str
            As in the model's configuration.

        Returns
        -------
        bool
            False also where the configuration has no such output.
        """
        return name in self._request.requested_output_names()

    def to_host(self, view: TensorView) -> npt.NDArray[Any]:
        """Return a tensor as an array of NumPy: a copy if it is on a GPU, after what is on the current stream.

        Parameters
        ----------
        view : TensorView
            An input, or an output that is written.

        Returns
        -------
        numpy.ndarray
            Of the view's shape and dtype. Where the view is on the host it is the same memory, valid as long as the
            call, and read-only for an input; else an array of its own.
        """
        return self._context.arrays.to_host(view) if isinstance(view, DeviceView) else view.numpy()

    def to_device(self, view: TensorView, stream: Any = None) -> Any:
        """Return a tensor as an array of CuPy: a copy on the instance's GPU if it is on the host.

        Parameters
        ----------
        view : TensorView
            An input, or an output that is written.
        stream : cupy.cuda.Stream, optional
            To copy on; by default the current one. From pinned memory (``SHM_PIN_HOST_MEMORY``) the copy is made while
            the host goes on; wait for a stream of your own before the call ends.

        Returns
        -------
        cupy.ndarray
            Of the view's shape and dtype. Where the view is on a GPU already it is the same memory, valid as long as
            the call.

        Raises
        ------
        MachineError
            CuPy or a GPU is missing.
        """
        if isinstance(view, DeviceView):
            return view.cupy()
        self._use_device(self._context.arrays.device)
        return self._context.arrays.to_device(view, stream)

    @property
    def stream(self) -> Any:
        """CuPy's current stream on the instance's GPU: what is launched there is finished before the response leaves.

        What is launched on other streams is the model's own to wait for.
        """
        self._use_device(self._context.arrays.device)
        return self._context.arrays.stream()

    @property
    def request_id(self) -> str:
        """As the client chose it; empty if it did not."""
        return str(self._request.request_id())

    @property
    def sequence(self) -> SequencePart | None:
        """The sequence that the request is part of, for models with a sequence batcher; None if it is none."""
        return sequence_of(self._request)

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

        Returns
        -------
        dict of str to TensorView
            Valid as long as they live, and at most until this call ends where they lie in the client's memory.

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
        return self._context.forwarder.finish(forwarding, self._context.backend.execute(forwarding.request))

    async def forward_async(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs = None,
        *,
        model_version: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, TensorView]:
        """As :meth:`forward`, while the event loop goes on. Await it before the call ends.

        Parameters
        ----------
        model, inputs, outputs, model_version, parameters
            As of :meth:`forward`.

        Returns
        -------
        dict of str to TensorView
            As of :meth:`forward`.

        Raises
        ------
        ModelError, TensorError, ForwardError
            As of :meth:`forward`.
        """
        forwarding = self._begin_forward(model, inputs, outputs, model_version, parameters)
        if self._pending is None:
            self._pending = set()
        self._pending.add(forwarding)
        try:
            response = await self._context.backend.execute_async(forwarding.request)
        except Exception:
            self._pending.discard(forwarding)
            raise
        self._pending.discard(forwarding)  # but not if it was cancelled: the other model goes on
        return self._context.forwarder.finish(forwarding, response)

    # What modes ask

    @property
    def spec(self) -> ModelSpec:
        """The model's configuration."""
        return self._context.spec

    def find_input(self, name: str) -> TensorView | None:
        """Return one input, as :meth:`input` does, if the request has it.

        Parameters
        ----------
        name : str
            As in the model's configuration.

        Returns
        -------
        TensorView or None
            As of :meth:`input`; None if the request does not have it.

        Raises
        ------
        ClosedError
            The call is over.
        """
        if self.table is not None and name in self.table.inputs:
            return self.input(name)
        self._check_open()
        return self._delivered(name)

    def span_of(self, name: str) -> tuple[Memory, InputSpan] | None:
        """Return where an input lies in the client's memory.

        Parameters
        ----------
        name : str
            As in the model's configuration.

        Returns
        -------
        tuple of Memory and InputSpan, or None
            None if it came another way.
        """
        span = None if self.table is None else self.table.inputs.get(name)
        return None if span is None else (self._memories[span.region], span)

    def room_for(self, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[Memory, OutputPlace] | None:
        """Return a place for an output in the client's memory.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        dtype : DType
            Not of strings.
        shape : tuple of int
            With the batch dimension, where the model has one.

        Returns
        -------
        tuple of Memory and OutputPlace, or None
            None if there is none that is large enough.
        """
        span = self._rooms.get(name)
        byte_size = math.prod(shape) * dtype.itemsize
        if span is None or byte_size > span.byte_size:
            return None
        place = OutputPlace(name, dtype, shape, span.region, span.offset, byte_size, False)
        return self._memories[span.region], place

    # What the above needs

    def _find_slot(self, address: Any) -> Slot | None:
        """Return the slot of an address that is used first; None if there is none, or it speaks to another model."""
        if address is None:
            return None
        parsed = parse_address(address)
        if parsed.model != self._context.spec.name:
            self._notice = f"; its {SLOT_PARAMETER} speaks to another model"
            return None
        check_direct_is_served(self._context.spec, SLOT_PARAMETER)
        return self._context.resolver.open_slot(address, parsed)

    def _find_slot_anew(self, slot: Slot, address: Any) -> Slot:
        """Return the slot of an address whose region was removed: the key may name another region by now."""
        self._context.resolver.registry.drop(slot.region)
        return self._context.resolver.open_slot(address, parse_address(address))

    def _begin_named(self, descriptor: Any) -> None:
        """Take in a request that names registered regions: nothing fences it, and there are no results."""
        model, table = parse_descriptor(descriptor)
        spec = self._context.spec
        if model != spec.name:
            self._notice = f"; its {DESCRIPTOR_PARAMETER} descriptor speaks to another model, see its field `model`"
            return
        check_direct_is_served(spec, DESCRIPTOR_PARAMETER)
        try:
            if self._slot is not None:
                raise TableError(DESCRIPTOR_PARAMETER, f"a descriptor beside {SLOT_PARAMETER}", "one of the two")
            self._memories = (_NO_MEMORY,)
            self._open_more(table)
            if spec.max_batch_size and table.inputs:
                check_batch_size(table, self._carried_batch_size())
            check_table(spec, table, self._memories)
        except BaseException:
            self._release()
            raise
        self.table = table
        self._rooms = table.outputs

    def _open_more(self, table: Table) -> None:
        """Open what a table names beside its slot."""
        if table.ring is not None:
            self._take_ring(table.ring, table.outputs)
        if not table.regions:
            return
        self._further = self._context.resolver.open_further(table, self._slot)
        self._memories = (*self._memories, *self._further.memories)
        # Who has lent a slot and gives the request up first raises the generation of his own. So it is asked once more.
        if self._further.borrowed and self._slot is not None and self._slot.record.generation != self._generation:
            raise stale()
        used = {span.region for span in table.inputs.values()} | {span.region for span in table.outputs.values()}
        for region in used:
            device = self._memories[region].device
            if device is not None:
                self._use_device(device)

    def _take_ring(self, ring: Ring, outputs: Mapping[str, OutputSpan]) -> None:
        """Refuse a ring: this call has one response."""
        name = self._context.spec.name
        raise TableError("frame_count", str(ring.frames), f"0: model {name!r} answers without a stream")

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("this call")

    def _check_nothing_is_pending(self) -> None:
        if self._pending:
            raise ModelError(
                f"model.py has left the call while {len(self._pending)} calls of forward_async were under way, or were "
                "cancelled; await them before"
            )

    @property
    def _has_results(self) -> bool:
        """Whether the client reads in shared memory where its outputs are."""
        return self._slot is not None

    def _delivered_tensors(self) -> dict[str, Any]:
        """Return what came with the request, by name, as the Python backend's tensors."""
        tensors = self._tensors
        if tensors is None:
            tensors = self._tensors = {}
            for tensor in self._request.inputs():
                tensors[tensor.name()] = tensor
        return tensors

    def _carried_batch_size(self) -> int | None:
        """Return what the batch carrier says; None if there is none."""
        carrier = self._delivered_tensors().get(BATCH_CARRIER)
        return None if carrier is None else int(carrier.shape()[0])

    def _delivered(self, name: str) -> TensorView | None:
        """Return an input that came with the request, read-only; None if it did not."""
        tensor = self._delivered_tensors().get(name)
        tensor_spec = self._context.spec.inputs.get(name)
        if tensor is None or tensor_spec is None:
            return None
        if not tensor.is_cpu():
            adopted = self._context.arrays.adopt(tensor.to_dlpack())
            dtype = dtypes.from_numpy(np.dtype(adopted.dtype), name)
            view = self._context.arrays.view(name, adopted, dtype, TRITON, writable=False)
            self._use_device(view.device)
            return view
        backend, row = self._context.backend, tensor_spec.dtype
        if row is not None and row is not BYTES:
            return DeliveredView(name, tensor, row, backend)
        array = backend.input(tensor, row)
        if array.dtype == BYTES.numpy:
            return StringsView(name, Strings.of(name, array), TRITON)
        array = array.view()
        array.flags.writeable = False
        return TensorView(name, array, dtypes.from_numpy(array.dtype, name), TRITON)

    def _answer_in_band(self, name: str, dtype: DType, array: Any) -> Output:
        """Take an array of NumPy or CuPy as an output that goes back through Triton."""
        view: TensorView
        if isinstance(array, np.ndarray):
            contiguous = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a scalar one-dimensional
            view = TensorView(name, contiguous, dtype, TRITON)
        else:
            view = self._context.arrays.view(name, array, dtype, TRITON, writable=True)
            self._use_device(view.device)
        output = self.outputs[name] = in_response(name, view, dtype)
        return output

    def _put_strings(self, name: str, strings: Strings) -> None:
        check_output(self._context.spec, name, BYTES.numpy, strings.shape)
        span = self._rooms.get(name)
        lying = None if span is None else strings.memory
        output = None if lying is None else self._passed_through(name, BYTES, lying, strings.shape)
        if output is None and span is not None:
            output = write_strings(name, strings, span, self._memories[span.region])
        self.outputs[name] = output or in_response(name, StringsView(name, strings, TRITON), BYTES)

    def _passed_through(self, name: str, dtype: DType, source: Any, shape: tuple[int, ...]) -> Output | None:
        """Return an output that *is* memory of an input, so that nothing is copied; None if ``source`` is no such."""
        if not self._has_results or name not in self._rooms or self.table is None:
            return None  # nobody would read in the results where the output is
        return passed_through(name, dtype, source, shape, self.table.inputs.values(), self._memories)

    def _fill(self, view: TensorView, source: Any) -> bool:
        """Copy an array of NumPy or CuPy to a view, unless it is that very memory; return whether it was not."""
        if isinstance(source, np.ndarray) and not isinstance(view, DeviceView):
            return copy_on_host(view.numpy(), source)
        self._use_device(self._context.arrays.copy(view, source))
        return True

    def _tensor(self, name: str, view: TensorView) -> Any:
        """Return an output as a tensor for the response."""
        backend = self._context.backend
        if type(view) is TensorView:
            return backend.output(name, view.array)
        if isinstance(view, StringsView):
            try:
                if not self._has_results:
                    return backend.output(name, view.numpy())
                return backend.output(name, np.frombuffer(view.strings().packed(), np.uint8))  # results have its shape
            except TensorError as error:
                raise may_not_write(error) from None
        assert isinstance(view, DeviceView)
        if self.table is not None:  # it found no room, and travels with the response
            return backend.output(name, self._context.arrays.to_host(view))
        return backend.device_output(name, view.__dlpack__(stream=-1))

    def _use_device(self, device: int) -> None:
        if self.devices is None:
            self.devices = set()
        self.devices.add(device)

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
            self._context.arrays.synchronize(sorted(self.devices))
        own = self._parameters
        callers = "" if own is None else str(own.get(CALLERS_PARAMETER, ""))
        lent = self._lendable()
        return self._context.forwarder.begin(model, inputs, outputs, parameters or {}, version, callers, lent)

    def _lendable(self) -> list[LentMemory | None]:
        """Return the regions of this request, by their numbers, as another model's request names them."""
        if self.table is None:
            return []
        claims: list[RegionClaim | None] = [
            None if self._slot is None else self._slot.lent_claim(),
            *self.table.regions,
        ]
        return [
            None if claim is None else LentMemory(claim, memory)
            for claim, memory in zip(claims, self._memories, strict=True)
        ]

    def _abort(self) -> None:
        """End the call without results; if another model may be at work on its memory, the client finds out itself."""
        self._is_open = False
        if self._pending:
            for forwarding in self._pending:
                forwarding.give_up()  # first: what begins from now on must not use the memory
            self._release()
            return
        if self.devices:  # the memory is the client's after this, and a device may be writing there
            with contextlib.suppress(ShmError):
                self._context.arrays.synchronize(sorted(self.devices))
        self._results = results.NO_RESULTS
        self.end()

    def _release(self) -> None:
        """Let go of the request's memory, and leave its slot's record as it is."""
        self._is_open = False
        if self._further is not None:
            self._further.release()
            self._further = None
        if self._slot is not None:
            slot, self._slot = self._slot, None
            slot.lease.give_back()
        self._memories = ()
