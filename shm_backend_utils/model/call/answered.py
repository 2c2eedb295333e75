"""The answering side of a request: its outputs, where they go, and how the call ends."""

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
from ...errors import ModelError, NoSharedMemoryError, ShmError, StaleRequestError, TableError, TensorError
from ...gpu.arrays.device_view import DeviceView
from ...protocol import results
from ...protocol.layout import COMPLETED, RESULTS
from ...protocol.spans import OutputSpan
from ...protocol.table import TensorForm
from ...tensors.strings import Strings
from ...tensors.view import DIRECT, TRITON, StringsView, TensorView
from ..forward.forwarder import check_all_are_over
from ..mapping.memory import HostMemory, InputView, MappedMemory
from ..triton import InBandView
from .checks import array_of, check_output, may_not_write, not_written
from .received import Output, ReceivedRequest

__all__ = ["AnsweredRequest"]

# Output's own constructor only wraps tuple.__new__. Calling tuple.__new__ directly saves time.
_output: Final[Callable[[type[Output], tuple[Any, ...]], Output]] = tuple.__new__


class AnsweredRequest(ReceivedRequest):
    """The half of a :class:`Call` that writes outputs: to the client's memory if they fit, else through Triton."""

    @property
    def response_parameters(self) -> dict[str, str | bool | int]:
        """The parameters of the response. ``model.py`` fills them; the client finds them in ``result.parameters``.

        In a stream they belong to the next response only. An error response has none. Triton older than 2.55 (25.02)
        does not support them: then this raises MachineError, and the client gets UNSUPPORTED.
        """
        if not self._is_open:
            raise self._not_open()
        if self._response_parameters is None:
            self._context.backend.check_sends_parameters()
            self._response_parameters = {}
        return self._response_parameters

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output. Fill it before the call ends.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        shape : sequence of int
            With the batch dimension, if the model has one. NumPy integers are fine.
        dtype : numpy dtype or dtype_like
            Not strings: use :meth:`put` for them.

        Returns
        -------
        TensorView
            C-contiguous and writable, but not cleared: it holds bytes of an earlier request until you overwrite them
            (``SHM_DEBUG`` finds elements that you did not write). It is the client's own memory if the client provided
            enough. Otherwise it is memory of this process, and goes back through Triton. It is on a GPU if the client
            wants the output there. Do not write to it after the call.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or another dtype or shape for it.
        """
        if not self._is_open:
            raise self._not_open()
        form, span = self._context.outputs.get(name), self._rooms.get(name)
        if form is not None and span is not None:
            data_type, _, end, kind, text, pack, _, _ = form
            region, offset, room = span
            memory = self._memories[region]
            try:
                shape = tuple(shape)
                if type(memory) is HostMemory and data_type.numpy == dtype and (not end or shape[-len(end) :] == end):
                    array: npt.NDArray[Any] = np.ndarray(shape, data_type.numpy, memory.array, memory.begin + offset)
                    byte_size = array.nbytes
                    if byte_size <= room:
                        encoded = pack(offset, byte_size, kind + region, *shape, text)
                        view = TensorView(name, array, data_type, DIRECT, memory.memory_type)
                        self.outputs[name] = _output(Output, (view, encoded, region, None, False))
                        return view
            except (TypeError, ValueError, struct.error):
                pass  # the output does not fit the mapping, or is invalid: the general code below handles both
        try:
            shape = tuple(map(index, shape))
            numpy_dtype = np.dtype(dtype)
        except TypeError as error:
            raise ModelError(
                f"output {name!r} was asked for with shape {shape!r} and dtype {dtype!r} ({error}); expected values "
                "such as (1, 3) and np.float32"
            ) from None
        data_type = check_output(self._context.spec, name, numpy_dtype, shape)
        if data_type is BYTES:
            raise ModelError(f"output {name!r} holds strings, whose size is not known yet; use call.put(name, strings)")
        place = self.room_for(name, data_type, shape)
        if place is not None:
            output = self.outputs[name] = self._at(name, data_type, shape, place[1])
        else:
            view = TensorView(name, np.empty(shape, numpy_dtype), data_type, TRITON)
            output = self.outputs[name] = Output(view, was_copied=True)
        return output.view

    def put(self, name: str, array: Any) -> None:
        """Set one output from an array. It copies once to the client's memory, or not at all if the array is there.

        An input, or a contiguous part of one, is passed through without a copy: the client then reads the output in the
        memory of its input.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        array : TensorView, Strings, numpy.ndarray, or any object that NumPy, DLPack or CUDA's array interface can read
            Or a list of arrays, numbers or strings, as for a client's input. Strings are bytes, or str in UTF-8. It may
            be on the host or on a GPU, wherever the client wants the output. You may overwrite an array of the host
            afterwards; one on a GPU only if the client has room for it, on a stream that :meth:`Call.ready_on` named.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        if not self._is_open:
            raise self._not_open()
        spec, kind = self._context.spec, type(array)
        if kind is InputView or kind is InBandView:
            shape, form = array.shape, self._context.outputs.get(name)
            fits = (
                (form is not None and array.dtype is form.dtype.numpy)
                and len(shape) == form.rank
                and (not form.fixed_end or shape[-len(form.fixed_end) :] == form.fixed_end)
            )
            has_room = name in self._rooms
            if kind is InBandView and not has_room:  # it goes back as it came
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

    def room_for(self, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[MappedMemory, OutputSpan] | None:
        """Return the place in the client's memory for an output that is not strings; None if the room is too small."""
        span = self._rooms.get(name)
        byte_size = math.prod(shape) * dtype.itemsize
        if span is None or byte_size > span.byte_size:
            return None
        return self._memories[span.region], span._replace(byte_size=byte_size)

    def commit(self, *, needs_all: bool = True) -> None:  # one function, for speed, as begin()
        """Copy outputs to their places (GPUs may finish later) and make the response; ModelError if one is missing."""
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
                        made[name] = output._replace(source=None)  # its memory can be free when GPUs are done
                        del source, output
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
                found = f"results of {len(encoded)} bytes for {len(all_encoded)} outputs"
                expected = (
                    f"at most {room}, the room in the slot's record; use larger records, or request fewer outputs"
                )
                raise TableError("record", found, expected)
        if self._response_parameters:
            self.response = context.backend.response_with(tensors, self._response_parameters)
            self._response_parameters = None
        else:
            self.response = context.backend.response(tensors)

    def end(self) -> None:
        """Write the results; the memory is the client's again."""
        self._is_open = False
        further = self._further
        if further is not None:
            self.outputs = {}  # the views of the outputs would keep the memory mapped
            further.unmap_passing()
        slot = self._slot
        if slot is not None:
            self._slot = None
            try:
                record, encoded = slot.record, self._results
                record.results[RESULTS : RESULTS + len(encoded)] = encoded
                record.model_words[COMPLETED] = self._generation  # last: it tells the client that the rest is written
            finally:
                slot.lease.give_back()
        if further is not None:
            further.release()
            self._further = None
        self._memories = ()

    def end_early(self) -> bool:
        """Write the results, and let a GPU write ``completed``, behind the call's work; return False if none can."""
        regions, slot, uses = self.awaited_regions, self._slot, self.devices
        if not regions or slot is None or uses is None or slot.region.managed is None:
            return False
        encoded = results.with_events(self._results, regions)
        slot.record.results[RESULTS : RESULTS + len(encoded)] = encoded
        try:
            lease = slot.work()  # before the slot's own lease ends: the client must see that this process lives
        except (NoSharedMemoryError, StaleRequestError):
            return False

        def rest(kept: object = slot) -> None:  # the slot keeps the region mapped, for the GPU
            lease.give_back()

        try:
            gpu_ends_it = uses.leave_to_gpu(slot.region.managed, slot.number, self._generation, rest)
        except BaseException:
            lease.give_back()
            raise
        if gpu_ends_it:
            self.outputs = {}
            self._release()
        else:
            lease.give_back()
        return gpu_ends_it

    def fail(self, error: BaseException) -> None:
        """End the call with an error response; the memory is the client's again."""
        try:
            self.response = self._context.backend.error_response(error)
        finally:
            if self._further is not None and self._further.passing:
                _forget_locals(error)  # views among the local variables would keep the memory mapped
            self._abort()

    def _in_band(self, name: str, dtype: DType, array: Any) -> Output:
        """Return an output that goes back through Triton: a copy of a host array, or a view of an array on a GPU."""
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
        assert view is not None  # callers have checked the size, and put no strings on a GPU
        return Output(view, self._encode(name, dtype, shape, span), region)

    def _encode(self, name: str, dtype: DType, shape: tuple[int, ...], span: OutputSpan | None = None) -> bytes:
        """Return an output's entry in the results; without a span, the entry refers to the response."""
        shape = self._context.spec.outputs[name].reshaped(shape)
        form = self._context.outputs.get(name) or TensorForm.of(name, dtype, len(shape))
        return form.encode(shape, *(span or (0, 0, 0)), is_in_response=span is None)

    def _tensor_of(self, name: str, view: TensorView) -> Any:
        context, backend = self._context, self._context.backend
        if type(view) is InBandView:
            return backend.pass_on(name, view.tensor)
        if isinstance(view, DeviceView):
            if self.table is None:
                return backend.from_dlpack(name, view.__dlpack__(stream=-1))
            return backend.output(name, context.arrays.to_host(view, self.devices))
        if not isinstance(view, StringsView):
            return backend.output(name, view.array)
        try:  # send encoded bytes if the client can read the shape in the results
            as_bytes = self._has_results and self._slot is not None
            return backend.output(name, np.frombuffer(view.strings().packed(), np.uint8) if as_bytes else view.numpy())
        except TensorError as error:
            raise may_not_write(error) from None

    def _put_strings(self, name: str, strings: Strings) -> None:
        check_output(self._context.spec, name, BYTES.numpy, strings.shape)
        span = self._rooms.get(name)
        lying = None if span is None else strings.memory
        output = None if lying is None else self._passed_through(name, BYTES, lying, strings.shape)
        if output is None:
            try:
                encoded = strings.packed()  # now, as model.py may overwrite its array afterwards
            except TensorError as error:
                raise may_not_write(error) from None
            output = None if span is None else self._copied_strings(name, strings, encoded, span)
        if output is None:
            output = Output(StringsView(name, Strings.of(name, strings.numpy()), TRITON), was_copied=True)
        self.outputs[name] = output

    def _copied_strings(self, name: str, strings: Strings, encoded: bytes, span: OutputSpan) -> Output | None:
        """Copy strings to the client's memory and return them as an output; None if they do not fit."""
        memory = self._memories[span.region]
        if len(encoded) > span.byte_size or not isinstance(memory, HostMemory):
            return None
        begin = memory.begin + span.offset
        memory.array[begin : begin + len(encoded)] = np.frombuffer(encoded, np.uint8)
        place = span._replace(byte_size=len(encoded))
        return self._at(name, BYTES, strings.shape, place)._replace(was_copied=True)

    def _passed_through(self, name: str, dtype: DType, source: Any, shape: tuple[int, ...]) -> Output | None:
        """Return an output in an input's memory; None if ``source``, an array or encoded strings, lies in no input."""
        nbytes, itemsize = source.nbytes, dtype.itemsize or 1
        if not nbytes or self._slot is None or name not in self._rooms or self.table is None:
            return None  # a client without a slot and room for the output does not look for its place in the results
        for span in self.table.inputs.values():
            offset = self._memories[span.region].offset_of(source)
            if offset is None or offset % itemsize:  # a part of an input may be misaligned for larger elements
                continue
            if span.offset <= offset and offset + nbytes <= span.offset + span.byte_size:
                return self._at(name, dtype, shape, OutputSpan(span.region, offset, nbytes), writable=False)
        return None

    def _adopted(self, value: Any) -> Any:
        return self._context.arrays.adopt(value, self._device_uses())

    def _fill(self, view: TensorView, source: Any) -> bool:
        """Copy an array, on the host or a GPU, to a view, unless both are one memory; return whether it was copied."""
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
        """End the call without results; if others may use its memory, leave it uncompleted, to spoil the memory."""
        self._is_open = False
        if self._pending:
            for forwarding in self._pending:
                forwarding.give_up()  # before the release, so that no other model begins to use memory that is released
            self._release()
            return
        if self.devices:  # a GPU may still write to memory that the client gets back below
            try:
                self.devices.wait_after_error()
            except ShmError:  # the GPU may write for ever: a request that is not completed spoils its memory
                self.devices.leave()
                self.outputs = {}
                self._release()
                return
            self.devices.release()
        self._results = results.NO_RESULTS
        self.end()


def _forget_locals(error: BaseException | None) -> None:
    """Clear the local variables that the tracebacks of an error and of its causes keep alive."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
