"""The answer to a request: its outputs, where they go, and the end of it."""

from __future__ import annotations

import math
import struct
import traceback
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BY_NAME, BYTES, DType
from ...errors import ModelError, ShmError, TableError, TensorError
from ...gpu.arrays.device_view import DeviceView
from ...protocol import results
from ...protocol.layout import COMPLETED, RESULTS
from ...protocol.spans import OutputSpan
from ...protocol.table import TensorForm
from ...tensors.strings import Strings
from ...tensors.view import DIRECT, TRITON, StringsView, TensorView
from ..forward.forwarder import check_all_are_over
from ..mapping.memory import HostMemory, InputView, Memory
from ..triton import DeliveredView
from .checks import array_of, check_output, may_not_write, not_written
from .received import Output, ReceivedRequest

__all__ = ["AnsweredRequest"]

# The work of a named tuple's own constructor, without the function around it.
_output: Final[Callable[[type[Output], tuple[Any, ...]], Output]] = tuple.__new__


class AnsweredRequest(ReceivedRequest):
    """The half of a :class:`Call` that writes: to the client's memory where that has room, else through Triton."""

    @property
    def response_parameters(self) -> dict[str, str | bool | int]:
        """The parameters of the response. ``model.py`` fills them; the client finds them in ``result.parameters``.

        Of a stream, it is of the next response alone. An error has none. It is a MachineError, and the client gets
        UNSUPPORTED, if this Triton has none: they came with Triton 2.55 (25.02).
        """
        if not self._is_open:
            raise self._not_open()
        if self._response_parameters is None:
            self._context.backend.check_sends_parameters()
            self._response_parameters = {}
        return self._response_parameters

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output, to be filled before the call ends.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        shape : sequence of int
            With the batch dimension, where the model has one. Integers of NumPy are fine.
        dtype : numpy dtype or dtype_like
            Not of strings: use :meth:`put`.

        Returns
        -------
        TensorView
            C-contiguous and writable, not cleared: it holds an earlier request's bytes until the model overwrites them
            (``SHM_DEBUG`` finds elements that stay unwritten). It is the client's own memory if the client provided
            enough; else it is memory of this process, and goes back through Triton. It is on a GPU if the client wants
            it there. Do not write to it after the call.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        if not self._is_open:
            raise self._not_open()
        form, span = self._context.outputs.get(name), self._rooms.get(name)
        if form is not None and span is not None:
            row, _, end, kind, text, pack, _, _ = form
            region, offset, room = span
            memory = self._memories[region]
            try:
                shape = tuple(shape)
                if type(memory) is HostMemory and row.numpy == dtype and (not end or shape[-len(end) :] == end):
                    array: npt.NDArray[Any] = np.ndarray(shape, row.numpy, memory.array, memory.begin + offset)
                    byte_size = array.nbytes
                    if byte_size <= room:
                        encoded = pack(offset, byte_size, kind + region, *shape, text)
                        view = TensorView(name, array, row, DIRECT, memory.memory_type)
                        self.outputs[name] = _output(Output, (view, encoded, region, None, False))
                        return view
            except (TypeError, ValueError, struct.error):
                pass  # it is larger than all of the memory, or not what the configuration says: so the general way
        try:
            shape = tuple(map(index, shape))
            numpy_dtype = np.dtype(dtype)
        except TypeError as error:
            raise ModelError(
                f"output {name!r} was asked for with shape {shape!r} and dtype {dtype!r} ({error}); expected for "
                "example (1, 3) and np.float32"
            ) from None
        row = check_output(self._context.spec, name, numpy_dtype, shape)
        if row is BYTES:
            raise ModelError(f"output {name!r} holds strings, of which nobody knows the size yet; use call.put()")
        place = self.room_for(name, row, shape)
        if place is not None:
            output = self.outputs[name] = self._at(name, row, shape, place[1])
        else:
            view = TensorView(name, np.empty(shape, numpy_dtype), row, TRITON)
            output = self.outputs[name] = Output(view, was_copied=True)
        return output.view

    def put(self, name: str, array: Any) -> None:
        """Give one output. One copy into the client's memory; none if the array is memory of this call already.

        An input, or a contiguous part of one, is passed through as it is: the client then sees the output where it
        wrote the input.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        array : TensorView, Strings, numpy.ndarray, or any object that NumPy, DLPack or CUDA's array interface can read
            Or a list of arrays, or numbers and strings, as a client may give it for an input. On the host or on a GPU,
            wherever the client wants the output. It may be written again afterwards, on the host, or, where the client
            has room for it, on the streams that :meth:`Call.ready_on` has named. Of strings: bytes, or str in UTF-8.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        if not self._is_open:
            raise self._not_open()
        spec, kind = self._context.spec, type(array)
        if kind is InputView or kind is DeliveredView:
            shape, form = array.shape, self._context.outputs.get(name)
            fits = (
                (form is not None and array.dtype is form.dtype.numpy)
                and len(shape) == form.rank
                and (not form.fixed_end or shape[-len(form.fixed_end) :] == form.fixed_end)
            )
            has_room = name in self._rooms
            if kind is DeliveredView and not has_room:  # as it came, so it goes
                if not fits:
                    check_output(spec, name, array.dtype, shape)
                self.outputs[name] = _output(Output, (array, b"", None, None, True))
                return
            if form and fits and has_room and type(array) is InputView and array.table is self.table and self._slot:
                _, _, region, offset, byte_size = array.table.inputs[array.name]
                if byte_size:
                    encoded = form.pack(offset, byte_size, form.kind + region, *shape, form.text)
                    self.outputs[name] = _output(Output, (array, encoded, region, None, False))
                    return
        if isinstance(array, StringsView):
            array = array.strings()
        if isinstance(array, Strings):
            self._put_strings(name, array)
            return
        source = array_of(spec, name, array, self._adopted)
        shape = tuple(source.shape)
        dtype = check_output(spec, name, np.dtype(source.dtype), shape)
        if dtype is BYTES:
            self._put_strings(name, Strings.of(name, source))
            return
        output = self._passed_through(name, dtype, source, shape)
        if output is None:
            place = self.room_for(name, dtype, shape)
            if place is None:
                output = self._in_band(name, dtype, source)
            else:
                output = self._at(name, dtype, shape, place[1])
                output = output._replace(was_copied=self._fill(output.view, source))
        self.outputs[name] = output

    def room_for(self, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[Memory, OutputSpan] | None:
        """Return a place for an output, not of strings, in the client's memory; None if none is large enough."""
        span = self._rooms.get(name)
        byte_size = math.prod(shape) * dtype.itemsize
        if span is None or byte_size > span.byte_size:
            return None
        return self._memories[span.region], span._replace(byte_size=byte_size)

    def commit(self, *, needs_all: bool = True) -> None:  # one function, as begin()
        """Bring the outputs to their places, or on their way there, and make the response; ModelError if one lacks."""
        if self._pending:
            check_all_are_over(self._pending)
        context = self._context
        requested = self._requested or self._request.requested_output_names()
        all_encoded: list[bytes] = []
        tensors: list[Any] = []
        made = self.outputs
        for name in context.spec.outputs:
            if name in requested:
                output = made.get(name)
                if output is not None:
                    view, encoded, region, source, _ = output
                    if source is not None:
                        self._fill(view, source)
                    if region is None:
                        tensors.append(self._tensor_of(name, view))
                        if self._slot is not None:
                            encoded = self._encode(name, BY_NAME[view.triton_dtype], view.shape)
                    all_encoded.append(encoded)
                elif needs_all:
                    raise not_written(context.spec, name)
        if self._slot is not None:
            encoded = self._results = results.assemble(all_encoded)
            room = self._slot.record.results_room
            if len(encoded) > room:
                found = f"{len(encoded)} bytes for the results of {len(all_encoded)} outputs"
                expected = f"at most {room}, the room of the slot's record; make larger ones, or ask for less at once"
                raise TableError("record", found, expected)
        if self._response_parameters:
            self.response = context.backend.response_with(tensors, self._response_parameters)
            self._response_parameters = None
        else:
            self.response = context.backend.response(tensors)

    def end(self, events: Sequence[int] = ()) -> None:
        """Write the results: the memory is the client's when GPUs have reached the events of these further regions."""
        self._is_open = False
        further = self._further
        if further is not None:
            self.outputs = {}  # their views would keep the memory mapped
            further.unmap_passing()
        slot = self._slot
        if slot is not None:
            self._slot = None
            try:
                record, encoded = slot.record, self._results
                if events:
                    encoded = results.with_events(encoded, events)
                record.results[RESULTS : RESULTS + len(encoded)] = encoded
                record.model_words[COMPLETED] = self._generation  # last: it says that all the rest is there
            finally:
                slot.lease.give_back()
        if further is not None:
            further.release()
            self._further = None
        self._memories = ()

    def fail(self, error: BaseException) -> None:
        """End the call by an error, which its response tells the client: the memory is the client's again."""
        try:
            self.response = self._context.backend.error_response(error)
        finally:
            if self._further is not None and self._further.passing:
                _forget_locals(error)  # views among them would keep the memory mapped
            self._abort()

    def _in_band(self, name: str, dtype: DType, array: Any) -> Output:
        """Return a copy of an array of the host, or an array of a GPU, as an output that goes back through Triton."""
        view: TensorView
        if isinstance(array, np.ndarray):
            view = TensorView(name, np.array(array, order="C"), dtype, TRITON)
        else:
            uses = self._use_device(array.device)
            view = self._context.arrays.view(name, array, dtype, TRITON, writable=True, uses=uses)
        return Output(view, was_copied=True)

    def _at(
        self, name: str, dtype: DType, shape: tuple[int, ...], span: OutputSpan, *, writable: bool = True
    ) -> Output:
        region, offset, byte_size = span
        view = self._memories[region].view(name, offset, byte_size, dtype, shape, writable=writable)
        assert view is not None  # its size was compared, and strings on a GPU refused
        return Output(view, self._encode(name, dtype, shape, span), region)

    def _encode(self, name: str, dtype: DType, shape: tuple[int, ...], span: OutputSpan | None = None) -> bytes:
        """Return the results' entry of an output, which is in the response if it has no span."""
        shape = self._context.spec.outputs[name].reshaped(shape)
        form = self._context.outputs.get(name) or TensorForm.of(name, dtype, len(shape))
        return form.encode(shape, *(span or (0, 0, 0)), is_in_response=span is None)

    def _tensor_of(self, name: str, view: TensorView) -> Any:
        context, backend = self._context, self._context.backend
        if type(view) is DeliveredView:
            return backend.pass_on(name, view.tensor)
        if isinstance(view, DeviceView):
            if self.table is None:
                return backend.from_dlpack(name, view.__dlpack__(stream=-1))
            return backend.output(name, context.arrays.to_host(view, self.devices))
        if not isinstance(view, StringsView):
            return backend.output(name, view.array)
        try:  # as bytes, where results have their shape
            as_bytes = self._has_results and self._slot is not None
            return backend.output(name, np.frombuffer(view.strings().packed(), np.uint8) if as_bytes else view.numpy())
        except TensorError as error:
            raise may_not_write(error) from None

    def _put_strings(self, name: str, strings: Strings) -> None:
        check_output(self._context.spec, name, BYTES.numpy, strings.shape)
        span = self._rooms.get(name)
        lying = None if span is None else strings.memory
        output = None if lying is None else self._passed_through(name, BYTES, lying, strings.shape)
        if output is None and span is not None:
            output = self._copied_strings(name, strings, span)
        self.outputs[name] = output or Output(StringsView(name, strings, TRITON), was_copied=True)

    def _copied_strings(self, name: str, strings: Strings, span: OutputSpan) -> Output | None:
        """Copy strings to the client's memory and return them as an output; None if they do not fit."""
        memory = self._memories[span.region]
        try:
            encoded = strings.packed()
        except TensorError as error:
            raise may_not_write(error) from None
        if len(encoded) > span.byte_size or not isinstance(memory, HostMemory):
            return None
        begin = memory.begin + span.offset
        memory.array[begin : begin + len(encoded)] = np.frombuffer(encoded, np.uint8)
        place = span._replace(byte_size=len(encoded))
        return self._at(name, BYTES, strings.shape, place)._replace(was_copied=True)

    def _passed_through(self, name: str, dtype: DType, source: Any, shape: tuple[int, ...]) -> Output | None:
        """Return an output that *is* memory of an input, of strings the bytes; None if ``source`` is no such."""
        nbytes, itemsize = source.nbytes, dtype.itemsize or 1
        if not nbytes or self._slot is None or name not in self._rooms or self.table is None:
            return None  # no client would read the output's place in the results
        for span in self.table.inputs.values():
            offset = self._memories[span.region].offset_of(source)
            if offset is None or offset % itemsize:  # bytes that are read as larger elements may lie at odd places
                continue
            if span.offset <= offset and offset + nbytes <= span.offset + span.byte_size:
                return self._at(name, dtype, shape, OutputSpan(span.region, offset, nbytes), writable=False)
        return None

    def _adopted(self, value: Any) -> Any:
        return self._context.arrays.adopt(value, self._device_uses())

    def _fill(self, view: TensorView, source: Any) -> bool:
        """Copy an array of the host or of a GPU to a view, unless it is that memory; return whether it was not."""
        if isinstance(source, np.ndarray) and not isinstance(view, DeviceView):
            target = view.numpy()
            is_there = target.__array_interface__["data"][0] == source.__array_interface__["data"][0]
            if is_there and source.flags.c_contiguous:
                return False
            np.copyto(target, source)
            return True
        uses = self._device_uses()
        for array in (view.array, source):
            if not isinstance(array, np.ndarray):
                uses.add(array.device)
        self._context.arrays.copy_all([(view.array, source)], uses)
        return True

    def _abort(self) -> None:
        """End the call without results; if another model may be at work on its memory, the client finds out itself."""
        self._is_open = False
        if self._pending:
            for forwarding in self._pending:
                forwarding.give_up()  # first: what begins from now on must not use the memory
            self._release()
            return
        if self.devices:  # the memory is the client's after this, and a device may be writing there
            try:
                self.devices.wait()
            except ShmError:  # and nobody knows until when: a request that is never completed spoils its memory
                self.devices.leave()
                self.outputs = {}
                self._release()
                return
            self.devices.release()
        self._results = results.NO_RESULTS
        self.end()


def _forget_locals(error: BaseException) -> None:
    """Have an error keep nothing of what functions had in hand that are over; those that it comes from, neither."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
