"""Arrays on GPUs for the calls of a session: import, allocation, copies and synchronization.

Copies run on the library's own streams, because no array library's current stream is known to be the right one. A copy
runs after earlier work on the streams that the call has named on its GPUs, and before later work there. On a GPU
without a named stream, the copy follows all work of that GPU, and the host waits for the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DType
from ..errors import CallerError, ModelError, translate
from ..memory.managed import ManagedRegion
from ..tensors.view import TensorView
from .arrays.copies import copy
from .arrays.device_array import DeviceArray, StridedArray, viewed
from .arrays.device_view import DeviceView
from .arrays.imported import device_of, imported
from .errors import CudaError
from .memory.access import CudaAccess
from .memory.pinned import PinnedRecords
from .ordering import Mark, OwnStreams, order_after
from .runtime import LEGACY_STREAM, CudaRuntime
from .scratch import Block, Dropped, Scratch
from .streams import NamedStream, named_stream
from .uses import DeviceUses

__all__ = ["InstanceGpus"]


class InstanceGpus:
    """The GPU work of calls. New arrays are on ``device`` by default. CUDA is loaded on first use. Thread-safe."""

    def __init__(self, cuda: CudaAccess, device: int) -> None:
        self.device = device
        self._cuda = cuda
        self._lock = threading.Lock()
        self._own: Scratch | None = None

    @property
    def runtime(self) -> CudaRuntime:
        """CUDA in this process; MachineError if CUDA or a GPU is missing."""
        return self._cuda.runtime

    @property
    def own_streams(self) -> OwnStreams:
        """The library's own streams; raises as :attr:`runtime`."""
        return self._scratch.streams

    @property
    def _scratch(self) -> Scratch:
        with self._lock:
            if self._own is None:
                self._own = Scratch(self.runtime)
            return self._own

    def adopt(self, value: Any, uses: DeviceUses | None = None) -> DeviceArray | StridedArray:
        """Return any library's array on a GPU as an array of this package, over the same memory.

        Later work on the call's named streams follows pending work of the array's library. The call then uses that GPU.
        """
        device = device_of(self.runtime, value, self.device)
        if uses is not None:
            uses.add(device)
        streams = self.own_streams
        stream = streams.borrow(device)
        try:
            array = imported(self.runtime, value, stream)
            self._let_wait(_streams_on(device, uses), device, stream)
        finally:
            streams.give_back(stream, device)
        return array

    def adopt_capsule(self, capsule: object) -> DeviceArray | StridedArray:
        """Return a DLPack capsule of GPU memory, with complete contents, as an array of this package."""
        return imported(self.runtime, capsule, LEGACY_STREAM)

    def view(
        self,
        name: str,
        array: DeviceArray | StridedArray,
        dtype: DType,
        path: str,
        *,
        writable: bool,
        uses: DeviceUses | None = None,
    ) -> DeviceView:
        """Return an array as a view: over its own memory, or over a copy if it is not C-contiguous."""
        if not isinstance(array, DeviceArray):
            contiguous = self._array(array.shape, dtype.numpy, array.device, uses)
            self.copy_all([(contiguous, array)], uses)
            array = contiguous
        if array.is_read_only == writable:
            array = viewed(array, is_read_only=not writable)
        return DeviceView(name, array, dtype, path)

    def empty(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        path: str,
        device: int | None = None,
        uses: DeviceUses | None = None,
    ) -> DeviceView:
        """Return new memory as a view: C-contiguous, writable, not cleared; by default on the instance's GPU."""
        array = self._array(shape, dtype.numpy, self.device if device is None else device, uses)
        return DeviceView(name, array, dtype, path)

    def copy_all(self, pairs: Sequence[tuple[Any, Any]], uses: DeviceUses | None = None) -> None:
        """Copy pairs of target and source, one after the other; at least one of each pair is on a GPU.

        Afterwards host memory may be overwritten, and GPU memory may be overwritten on the named streams.
        """
        on_gpus = [array for pair in pairs for array in pair if not isinstance(array, np.ndarray)]
        devices = sorted({array.device for array in on_gpus})
        if not devices:
            return
        runtime, device = self.runtime, devices[0]
        named = {each: _streams_on(each, uses) for each in devices}
        with self.own_streams.one(device) as stream:
            for each, streams in named.items():
                self._order_after(streams, each, stream)
            for target, source in pairs:
                copy(runtime, target, source, stream)
            for streams in named.values():
                self._let_wait(streams, device, stream)
            if not all(named.values()) or any(isinstance(source, np.ndarray) for _, source in pairs):
                runtime.synchronize_stream(stream, device)
            elif uses is not None:  # own memory is not used again before the call's end
                uses.keep(array for array in on_gpus if not Scratch.owns(array))

    def to_host(self, view: DeviceView, uses: DeviceUses | None = None) -> npt.NDArray[Any]:
        """Return a complete copy in host memory."""
        copied = np.empty(view.shape, view.dtype)
        self.copy_all([(copied, view.array)], uses)
        return copied

    def to_device(self, view: TensorView, uses: DeviceUses, stream: NamedStream | None = None) -> DeviceArray:
        """Return a copy on the instance's GPU, for later work on ``stream``; by default, consumers wait for it."""
        device, runtime = self.device, self.runtime
        uses.add(device)
        streams, own = uses.own_stream(device)
        uses.reads_host = True
        source = view.numpy()
        with runtime.current(device):
            if stream is not None:
                copied = self._array(view.shape, view.dtype, device, uses)
                copy(runtime, copied, source, stream.handle)
                order_after(streams, [stream], device, own)
                return copied
            if view.writable:  # an output, which the GPU may still write
                self._order_after(uses.streams[device], device, own)
            copied = self._scratch.array(view.shape, view.dtype, device, uses.dropped, written_on=own, streams=streams)
            copy(runtime, copied, source, own)
            return copied

    def wait(self, uses: Iterable[DeviceUses]) -> None:
        """Wait until GPUs have finished the work on the calls' named streams, or all work if a call named none there.

        CudaError if that work has failed; ModelError if a named stream is being captured or, without names, any is.
        """
        every = list(uses)
        dropped = [block for each in every for block in each.take_dropped()]
        try:
            for device in sorted({device for each in every for device in each}):
                self.wait_on(device, [each for each in every if device in each])
        except BaseException:
            for block in dropped:
                self._scratch.retire(block)
            raise
        self.put_back(dropped)

    def wait_on(self, device: int, using: Sequence[DeviceUses]) -> None:
        """Wait on one GPU, as :meth:`wait` does."""
        runtime = self.runtime
        if not all(each.streams[device] for each in using):
            with _refused_in_captures():
                runtime.synchronize_device(device)
            return
        streams = _all_streams_on(device, using)
        with runtime.current(device):
            self._check_is_not_captured(streams)
            for each in streams:
                with contextlib.closing(Mark(self.own_streams, each.handle, device)) as mark:
                    mark.wait()

    def put_back(self, dropped: Sequence[Block]) -> None:
        """Mark own memory as free again, after the GPUs have finished with it."""
        if dropped:
            self._scratch.put_back(dropped)

    def new_dropped(self) -> Dropped:
        """Return a new place for the memory of one call's arrays."""
        return Dropped(self._scratch.retire)

    def complete(
        self, uses: DeviceUses, region: ManagedRegion, slot: int, generation: int
    ) -> Callable[[], bool] | None:
        """Let a GPU write a slot's ``completed`` behind all work of a call that has named streams on each GPU.

        Return a function that tells whether it is written, or never will be; None if no GPU can write it. CudaError if
        the call's work has failed.
        """
        runtime, records = self.runtime, PinnedRecords.of(self.runtime, region)
        named = [stream for streams in uses.streams.values() for stream in streams]
        places = [(each, address) for each in uses if (address := records.completed(slot, each)) is not None]
        if not places:
            return None
        device, address = places[0]
        try:
            streams, own = uses.own_stream(device)
            with runtime.current(device):
                order_after(streams, named, device, own)
                runtime.write_word(address, generation, own)
        except CudaError as error:
            if error.is_final:
                raise
            return None

        def is_over(_: OwnStreams = streams) -> bool:  # the streams live as long as this function
            try:
                with runtime.current(device):
                    return runtime.is_stream_done(own)
            except CudaError as error:
                return not error.is_capture  # another error may stay for ever, as that of a lost GPU does

        return is_over

    def stream_of(self, value: Any, meant: int) -> NamedStream:
        """Return a model's stream with its GPU; a default stream belongs to GPU ``meant``."""
        try:
            named = named_stream(value)
            with self.runtime.current(meant if named.device is None else named.device):
                stream = NamedStream(named.handle, named.device_on(self.runtime, meant), named.owner)
                self._check_is_not_captured([stream])
                return stream
        except CallerError as error:
            raise ModelError(str(error)) from None

    def instance_stream(self, value: Any) -> NamedStream:
        """Return a stream as :meth:`stream_of` does; ModelError also if it is not of the instance's GPU."""
        stream = self.stream_of(value, self.device)
        if stream.device != self.device:
            raise ModelError(
                f"a stream of GPU {stream.device} was given, but the copy is made on the instance's GPU {self.device}; "
                "pass a stream of that GPU, or none"
            )
        return stream

    def make_current(self) -> None:
        """Make the instance's GPU current in the calling thread."""
        self.runtime.make_current(self.device)

    def _check_is_not_captured(self, streams: Iterable[NamedStream]) -> None:
        """Raise ModelError if a stream is being captured into a graph, because the library cannot wait for it."""
        for stream in streams:
            assert stream.device is not None
            with self.runtime.current(stream.device):
                if self.runtime.is_capturing(stream.handle):
                    raise ModelError(
                        f"a stream of GPU {stream.device} that was named is being captured into a graph, so the "
                        "library cannot wait for it; end the capture first, or name the stream that the graph is "
                        "launched on"
                    )

    def close(self) -> None:
        """Return memory and streams that no array uses to CUDA. Twice is fine."""
        if self._own is not None:
            self._own.close()

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, uses: DeviceUses | None) -> DeviceArray:
        return self._scratch.array(shape, dtype, device, None if uses is None else uses.dropped)

    def _order_after(self, named: Sequence[NamedStream], device: int, stream: int) -> None:
        """Make later work on ``stream`` wait for a GPU's named streams or, if none is named, for all its work."""
        self._check_is_not_captured(named)
        with _refused_in_captures():
            order_after(self.own_streams, named, device, stream)

    def _let_wait(self, named: Sequence[NamedStream], device: int, stream: int) -> None:
        """Make later work on named streams wait for a GPU's ``stream``."""
        for each in named:
            assert each.device is not None
            order_after(self.own_streams, [NamedStream(stream, device)], each.device, each.handle)


def _refused_in_captures() -> translate[CudaError]:
    return translate(CudaError, _meaning)


def _meaning(error: CudaError) -> ModelError | None:
    if not error.is_capture:
        return None
    return ModelError(
        "this call names no stream on a GPU, so the library must wait for all work there; but a stream of this process "
        f"is being captured into a graph, and that wait would end the capture ({error.name}); name the call's streams "
        "by call.ready_on, or capture no graph meanwhile"
    )


def _all_streams_on(device: int, using: Iterable[DeviceUses]) -> Sequence[NamedStream]:
    """Return the streams on a GPU that calls have named, and the library's own that the calls use; empty if none."""
    named = {stream for each in using for stream in each.streams[device]}
    if named:
        named |= {stream for each in using for _, stream in each.own if stream.device == device}
    return sorted(named)


def _streams_on(device: int, uses: DeviceUses | None) -> Sequence[NamedStream]:
    """Return the streams that a call has named on a GPU; empty if none."""
    return () if uses is None else uses.streams.get(device, ())
