"""CUDA without a GPU: a stand-in for the runtime, on any machine and across processes.

It keeps CUDA's rules where code can break them: who may open which handle, which device must be current, what was
freed, what has not been waited for. What CUDA leaves undefined fails here: memory that was closed is gone.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...memory.cuda.runtime import CudaRuntime, device_guard
from ...tensors import dlpack
from .device_array import FakeCapsule, FakeDeviceArray, c_strides, kernel
from .events import FakeEvents
from .memories import FakeMemories, LiveCounts, failure
from .memory import remove_what_the_dead_left
from .stream import FakeStream, FakeStreams
from .transfer import Array, PinnedMemory, transfer

__all__ = ["FakeCuda", "FakeDeviceArray", "FakeStream", "LiveCounts", "kernel"]

_LEGACY_STREAM: Final = 1


class FakeCuda(FakeEvents):
    """CUDA on GPUs that do not exist. Two of these in one process are to each other as two processes are.

    Addresses are real: the memory is mapped there. New memory is full of rubbish. What is on a stream is done when that
    stream is synchronized, or one that waits for it, or when memory is freed; see :class:`FakeStream`. The streams 0, 1
    and 2 are the calling thread's default stream of the current device. A forked child can use nothing.

    Parameters
    ----------
    devices : int
        How many GPUs there are.
    uuids : sequence of str, optional
        Theirs, 32 lowercase hexadecimal digits each. By default GPU n has the same in every process.

    Attributes
    ----------
    log : list of (str, object)
        What was done, in order: a method's name with the address, byte size or device that it was about; or with a
        tuple: ``("pin", (address, byte_size))``, ``("order", (first, then))``, ``("copy", (direction, byte_size,
        stream))``.
    """

    def __init__(self, devices: int = 2, uuids: Sequence[str] | None = None) -> None:
        super().__init__()
        self._uuids = tuple(uuids) if uuids is not None else tuple(_uuid_of(device) for device in range(devices))
        if len(self._uuids) != devices:
            raise ValueError(f"{len(self._uuids)} UUIDs were given for {devices} devices; expected one for each")
        self.log: list[tuple[str, Any]] = []
        self._pid = os.getpid()
        self._memories = FakeMemories(self._pid)
        self._streams = FakeStreams(self.log)
        self._thread = _Thread()
        self._failures: defaultdict[str, deque[str]] = defaultdict(deque)
        self._pinned = PinnedMemory()
        remove_what_the_dead_left()

    @property
    def live(self) -> LiveCounts:
        """What has not been given back."""
        return LiveCounts(self._memories.allocation_count, self._memories.opened_count, self._pinned.count)

    def fail_next(self, method: str, name: str) -> None:
        """Let the next call of a method of the interface fail by CUDA's error of a name. Several are used up in order.

        Raises
        ------
        ValueError
            The interface has no such method.
        """
        if method not in CudaRuntime.__abstractmethods__:
            raise ValueError(f"CudaRuntime has no method {method!r} that could fail")
        self._failures[method].append(name)

    def device_count(self) -> int:
        return len(self._uuids)

    def device_uuid(self, device: int) -> str:
        self._check_device(device, "device_uuid")
        return self._uuids[device]

    def current_device(self) -> int:
        return self._current("current_device")

    def set_device(self, device: int) -> None:
        self._check_device(device, "set_device")
        self._thread.device = device
        self.log.append(("set_device", device))

    def allocate(self, byte_size: int) -> int:
        device = self._current("allocate")
        memory = self._memories.allocate(byte_size, device, self._uuids[device])
        self.log.append(("allocate", byte_size))
        return memory.address

    def free(self, address: int) -> None:
        self._memories.allocated(address, "free")
        self._streams.drain()
        self._memories.free(address)
        self.log.append(("free", address))

    def export(self, address: int) -> bytes:
        handle = self._memories.allocated(address, "export").handle
        self.log.append(("export", address))
        return handle.encode()

    def open(self, handle: bytes) -> int:
        device = self._current("open")
        address = self._memories.open(handle, device, self._uuids[device]).address
        self.log.append(("open", address))
        return address

    def close(self, address: int) -> None:
        self._streams.drain()
        self._memories.close(address)
        self.log.append(("close", address))

    def extent(self, address: int) -> tuple[int, int]:
        memory = self._memories.at(address, "extent")
        return memory.address, memory.byte_size

    def pin(self, address: int, byte_size: int) -> None:
        self._pinned.add(address, byte_size)
        self.log.append(("pin", (address, byte_size)))

    def unpin(self, address: int) -> None:
        self._pinned.remove(address)
        self.log.append(("unpin", address))

    def stream(self) -> FakeStream:
        """Return a new stream of the current device."""
        return self._streams.create(self._current("stream"))

    def current_stream(self) -> FakeStream:
        return self._streams.current(self._current("current_stream"))

    def create_stream(self) -> int:
        stream = self.stream()
        self.log.append(("create_stream", stream.ptr))
        return stream.ptr

    def destroy_stream(self, stream: int) -> None:
        self._streams.destroy(self._stream(stream, "destroy_stream"))
        self.log.append(("destroy_stream", stream))

    def stream_address(self, stream: FakeStream) -> int:
        return stream.ptr

    def synchronize(self, stream: int) -> None:
        self._stream(stream, "synchronize").synchronize()

    def order(self, first: int, then: int) -> None:
        self._stream(then, "order").wait_for(self._stream(first, "order"))
        self.log.append(("order", (first, then)))

    def launch(self, stream: FakeStream, function: Callable[[], object]) -> None:
        """Put a function on a stream, as a kernel; that stream's device must be the current one."""
        self._check_is_current(stream, "launch")
        stream.put(function)
        self.log.append(("launch", stream.ptr))

    def array(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> FakeDeviceArray:
        """Return an array as the interface says; CudaError unless all of it lies in one memory of that device."""
        strides = c_strides(shape, dtype.itemsize)
        array = FakeDeviceArray(self, None, address, shape, dtype, strides, device, owner)
        return array.inside(self._memories.at(address, "array")) if array.nbytes else array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeDeviceArray:
        device = self._current("empty")
        array = FakeDeviceArray(self, None, 0, shape, dtype, c_strides(shape, dtype.itemsize), device)
        if not array.nbytes:
            return array
        memory = self._memories.allocate_for_array(array.nbytes, device, self._uuids[device])
        self.log.append(("empty", array.nbytes))
        return replace(array, memory=memory, address=memory.address)

    def adopt(self, value: Any) -> FakeDeviceArray:
        """Return an array as the interface says; also of what has nothing but ``__cuda_array_interface__``.

        Raises
        ------
        BufferError
            It is not on a GPU.
        TypeError
            It is nothing of these.
        """
        if isinstance(value, FakeDeviceArray) and value.runtime is self:
            return value
        if isinstance(value, FakeCapsule):
            return self._alias(value.take())
        if hasattr(value, "__dlpack__"):
            kind, device = value.__dlpack_device__()
            if kind not in dlpack.ON_GPU:
                raise BufferError(f"the array has DLPack device type {kind}; expected {dlpack.CUDA}, a GPU's")
            with device_guard(self, device):
                return self.adopt(value.__dlpack__(stream=self.current_stream().ptr))
        if hasattr(value, "__cuda_array_interface__"):
            return self._alias(value)
        raise TypeError(f"{type(value).__name__} has neither __dlpack__ nor __cuda_array_interface__")

    def address_of(self, array: FakeDeviceArray) -> int:
        return array.address

    def is_contiguous(self, array: FakeDeviceArray) -> bool:
        return array.is_contiguous

    def capsule(self, array: FakeDeviceArray, stream: int | None, max_version: tuple[int, int] | None) -> FakeCapsule:
        """Return what :meth:`adopt` understands. ValueError for stream 0, which the standard forbids for CUDA."""
        if stream == 0:
            raise ValueError("stream 0 is ambiguous; expected 1 (legacy default), 2 (per-thread default), above, or -1")
        if stream != -1:
            with device_guard(self, array.device):
                self.order(self.current_stream().ptr, _LEGACY_STREAM if stream is None else stream)
        return FakeCapsule(array, max_version)

    def copy(self, target: Array, source: Array, stream: int) -> None:
        """Copy as the interface says. With host memory that is not pinned, the copy is done when this returns."""
        queue = self._stream(stream, "copy")
        self._check_is_current(queue, "copy")
        queue.put(transfer(target, source))
        if not all(self._pinned.contains(array) for array in (target, source) if isinstance(array, np.ndarray)):
            queue.drain()
        direction = " to ".join("host" if isinstance(array, np.ndarray) else "device" for array in (source, target))
        self.log.append(("copy", (direction, source.nbytes, stream)))

    def _current(self, method: str) -> int:
        self._check_device(self._thread.device, method)
        return self._thread.device

    def _check_device(self, device: int, method: str) -> None:
        if not self._uuids:
            raise failure(method, "cudaErrorNoDevice")
        if not 0 <= device < len(self._uuids):
            raise failure(method, "cudaErrorInvalidDevice")

    def _stream(self, number: int, method: str) -> FakeStream:
        stream = self._streams.find(number, self._current(method))
        if stream is None:
            raise failure(method, "cudaErrorInvalidResourceHandle")
        return stream

    def _check_is_current(self, stream: FakeStream, method: str) -> None:
        if stream.device != self._current(method):
            raise failure(method, "cudaErrorInvalidResourceHandle")

    def _alias(self, value: Any) -> FakeDeviceArray:
        interface = value.__cuda_array_interface__
        (address, _), shape, dtype = interface["data"], interface["shape"], np.dtype(interface["typestr"])
        strides = interface.get("strides") or c_strides(shape, dtype.itemsize)
        if not math.prod(shape):
            return FakeDeviceArray(self, None, address, shape, dtype, strides, self._current("adopt"), value)
        memory = self._memories.at(address, "adopt")
        return FakeDeviceArray(self, memory, address, shape, dtype, strides, memory.device, value)


class _Thread(threading.local):
    """What each thread has for itself."""

    device = 0


def _uuid_of(device: int) -> str:
    return hashlib.sha256(f"fake GPU {device}".encode()).hexdigest()[:32]


def _entered(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the interface that first fails, in a forked child or where :meth:`fail_next` said so."""

    @functools.wraps(method)
    def entered(cuda: FakeCuda, *arguments: Any, **named: Any) -> Any:
        if os.getpid() != cuda._pid:
            raise failure(name, "cudaErrorInitializationError")
        if cuda._failures[name]:
            raise failure(name, cuda._failures[name].popleft())
        return method(cuda, *arguments, **named)

    return entered


for _name in CudaRuntime.__abstractmethods__:
    setattr(FakeCuda, _name, _entered(_name, getattr(FakeCuda, _name)))
