"""A CuPy, a CUDA runtime and a driver that note what they are asked for, and do nothing."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH

HANDLE = bytes(range(HANDLE_LENGTH))
NAMES = {2: "cudaErrorMemoryAllocation", 35: "cudaErrorInsufficientDriver", 700: "cudaErrorIllegalAddress"}
STREAM = 5
F32 = np.dtype(np.float32)


class FakeCudaRuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{NAMES[status]}: in CUDA's words: so and so")


class FakeCudaDriverError(RuntimeError):
    status = 700


class FakeOutOfMemoryError(MemoryError):
    pass


class FakeArray:
    """``cupy.ndarray``, over host memory."""

    def __init__(self, memory: npt.NDArray[Any], device: int = 0) -> None:
        self.memory = memory
        self.shape, self.dtype, self.nbytes, self.flags = memory.shape, memory.dtype, memory.nbytes, memory.flags
        self.data = SimpleNamespace(ptr=memory.ctypes.data, device_id=device)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self.memory[key], self.data.device_id)


class FakeCudaCalls:
    """``cupy.cuda.runtime``: notes every call, carries out copies, and fails where it is told to."""

    CUDARuntimeError = FakeCudaRuntimeError
    cudaIpcMemLazyEnablePeerAccess = 1
    eventDisableTiming = 2
    streamNonBlocking = 1
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    memoryTypeHost = 1

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.failing = ""
        self.device = 0
        self.pinned: set[int] = set()
        self.devices_by_address: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.noted.append((name, *arguments))
            if name == self.failing:
                raise FakeCudaRuntimeError(700)
            return getattr(self, f"_{name}", lambda *_: 42)(*arguments)

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _getDevice(self) -> int:
        return self.device

    def _setDevice(self, device: int) -> None:
        self.device = device

    def _ipcGetMemHandle(self, address: int) -> bytes:
        return HANDLE

    def _pointerGetAttributes(self, address: int) -> SimpleNamespace:
        return SimpleNamespace(type=int(address in self.pinned), device=self.devices_by_address.get(address))

    def _memcpyAsync(self, target: int, source: int, byte_size: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, byte_size)

    def _memcpyPeerAsync(self, target: int, to: int, source: int, of: int, byte_size: int, stream: int) -> None:
        ctypes.memmove(target, source, byte_size)

    def _check_status(self, status: int) -> None:
        if status:
            raise FakeCudaRuntimeError(status)

    def names(self) -> list[str]:
        return [name for name, *_ in self.noted]


class FakeCupy(types.ModuleType):
    """``cupy``; what works on arrays notes the device and the stream on which it does."""

    def __init__(self, calls: FakeCudaCalls) -> None:
        super().__init__("cupy")
        self.calls = calls
        self.worked: list[tuple[str, int, int]] = []
        self.stream = 0
        self.ndarray = FakeArray
        self.cuda = SimpleNamespace(
            runtime=calls,
            driver=SimpleNamespace(CUDADriverError=FakeCudaDriverError),
            memory=SimpleNamespace(OutOfMemoryError=FakeOutOfMemoryError),
            Stream=SimpleNamespace(from_external=lambda stream: self.on(stream.__cuda_stream__()[1])),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
        )

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        former, self.stream = self.stream, stream
        yield
        self.stream = former

    def note(self, what: str) -> None:
        self.worked.append((what, self.calls.device, self.stream))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeArray:
        self.note("empty")
        return FakeArray(np.empty(shape, dtype), self.calls.device)

    def ascontiguousarray(self, array: FakeArray) -> FakeArray:
        self.note("pack")
        return FakeArray(np.ascontiguousarray(array.memory), array.data.device_id)

    def copyto(self, target: FakeArray, source: FakeArray) -> None:
        self.note("copyto")
        np.copyto(target.memory, source.memory)

    def from_dlpack(self, value: Any) -> tuple[str, Any]:
        return ("from_dlpack", value)

    def asarray(self, value: Any) -> tuple[str, int]:
        return ("asarray", self.calls.device)


class FakeDriver:
    """``libcuda.so.1``, with one GPU, whose UUID has zeros in it."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device + 7
        return 0

    def cuDeviceGetUuid(self, octets: Any, number: Any) -> int:
        octets._obj[:] = [number.value, 0, 0xAB, *range(13)]
        return 0

    def cuMemGetAddressRange_v2(self, begin: Any, byte_size: Any, address: Any) -> int:
        begin._obj.value, byte_size._obj.value = address.value & ~0xFFFF, 1 << 33
        return 0


def host(*shape: int) -> npt.NDArray[Any]:
    return np.arange(1, 1 + np.prod(shape), dtype=F32).reshape(shape)


def on_device(*shape: int, device: int = 0) -> FakeArray:
    return FakeArray(np.zeros(shape, F32), device)


EVERY_CALL: list[tuple[str, str, Callable[[CupyRuntime], Any]]] = [
    ("getDeviceCount", "counting the GPUs", lambda runtime: runtime.device_count()),
    ("check_status", "asking for the UUID of GPU 3", lambda runtime: runtime.device_uuid(3)),
    ("getDevice", "asking for the current GPU", lambda runtime: runtime.current_device()),
    ("setDevice", "making GPU 3 current", lambda runtime: runtime.set_device(3)),
    ("malloc", "allocating 9 bytes of GPU memory", lambda runtime: runtime.allocate(9)),
    ("free", "freeing GPU memory", lambda runtime: runtime.free(9)),
    ("ipcGetMemHandle", "exporting GPU memory", lambda runtime: runtime.export(9)),
    ("ipcOpenMemHandle", "opening another process' GPU memory", lambda runtime: runtime.open(HANDLE)),
    ("ipcCloseMemHandle", "closing another process' GPU memory", lambda runtime: runtime.close(9)),
    ("check_status", "asking for the extent of GPU memory", lambda runtime: runtime.extent(9)),
    ("hostRegister", "pinning 9 bytes of host memory", lambda runtime: runtime.pin(9, 9)),
    ("hostUnregister", "unpinning host memory", lambda runtime: runtime.unpin(9)),
    ("streamSynchronize", "waiting for the GPU", lambda runtime: runtime.synchronize(9)),
    ("eventRecord", "ordering two streams", lambda runtime: runtime.order(8, 9)),
    ("memcpyAsync", "copying 24 bytes", lambda runtime: runtime.copy(on_device(6), host(6), STREAM)),
]
