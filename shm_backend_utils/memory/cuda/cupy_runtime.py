"""CUDA by CuPy: its thin runtime calls, and its arrays over memory that is not its own.

What CuPy lacks is asked of the driver, ``libcuda.so.1``. The runtime and the driver number their errors alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import MachineError
from .runtime import CudaError, CudaRuntime, device_guard

__all__ = ["CupyRuntime"]

_Result = TypeVar("_Result")

_UUID_LENGTH: Final = 16
_SUCCESS: Final = 0  # cudaSuccess
_NOT_READY: Final = 600  # cudaErrorNotReady
_INSUFFICIENT_DRIVER: Final = 35  # cudaErrorInsufficientDriver
_PLAIN: Final = 0  # cudaHostRegisterDefault; with unified addressing, memory is then pinned for every device


class CupyRuntime(CudaRuntime):
    """CUDA by CuPy 12 or later. Making one imports CuPy, and asks nothing of the GPU yet.

    Raises
    ------
    MachineError
        CuPy is not installed, or cannot be imported.
    """

    def __init__(self) -> None:
        self._cupy = _imported_cupy()
        self._cuda = self._cupy.cuda.runtime
        self._uuids: dict[int, str] = {}

    def device_count(self) -> int:
        with self._telling("counting the GPUs"):
            return int(self._cuda.getDeviceCount())

    def device_uuid(self, device: int) -> str:
        # Not by getDeviceProperties: what CuPy returns ends at the UUID's first zero byte.
        uuid = self._uuids.get(device)
        if uuid is None:
            number = ctypes.c_int()
            octets = (ctypes.c_ubyte * _UUID_LENGTH)()
            with self._telling(f"asking for the UUID of GPU {device}"):
                self._ask_driver("cuInit", 0)
                self._ask_driver("cuDeviceGet", ctypes.byref(number), device)
                # The second version of this call would tell MIG instances apart.
                self._ask_driver("cuDeviceGetUuid", ctypes.byref(octets), number)
            uuid = self._uuids[device] = bytes(octets).hex()
        return uuid

    def current_device(self) -> int:
        with self._telling("asking for the current GPU"):
            return int(self._cuda.getDevice())

    def set_device(self, device: int) -> None:
        with self._telling(f"making GPU {device} current"):
            self._cuda.setDevice(device)

    def allocate(self, byte_size: int) -> int:
        with self._telling(f"allocating {byte_size} bytes of GPU memory"):
            return int(self._cuda.malloc(byte_size))

    def free(self, address: int) -> None:
        with self._telling("freeing GPU memory"):
            self._cuda.deviceSynchronize()  # cudaFree itself only "may" wait
            self._cuda.free(address)

    def export(self, address: int) -> bytes:
        with self._telling("exporting GPU memory"):
            return bytes(self._cuda.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        with self._telling("opening another process' GPU memory"):
            return int(self._cuda.ipcOpenMemHandle(bytes(handle), self._cuda.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        with self._telling("closing another process' GPU memory"):
            self._cuda.deviceSynchronize()
            self._cuda.ipcCloseMemHandle(address)

    def extent(self, address: int) -> tuple[int, int]:
        begin, byte_size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._telling("asking for the extent of GPU memory"):
            self._cuda.free(0)  # makes CUDA ready for a thread that is new to it, as the driver would not
            self._ask_driver(
                "cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(byte_size), ctypes.c_uint64(address)
            )
        return begin.value, byte_size.value

    def pin(self, address: int, byte_size: int) -> None:
        with self._telling(f"pinning {byte_size} bytes of host memory"):
            self._cuda.hostRegister(address, byte_size, _PLAIN)

    def unpin(self, address: int) -> None:
        with self._telling("unpinning host memory"):
            self._cuda.hostUnregister(address)

    def current_stream(self) -> Any:
        with self._telling("asking for the current stream"):
            return self._cupy.cuda.get_current_stream()

    def create_stream(self) -> int:
        with self._telling("making a stream"):
            return int(self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        with self._telling("destroying a stream"):
            self._cuda.streamDestroy(stream)

    def stream_address(self, stream: Any) -> int:
        return int(stream.ptr)

    def synchronize(self, stream: int) -> None:
        with self._telling("waiting for the GPU"):
            self._cuda.streamSynchronize(stream)

    def order(self, first: int, then: int) -> None:
        if first == then:
            return
        with self._telling("ordering two streams"):
            event = self._cuda.eventCreateWithFlags(self._cuda.eventDisableTiming)
            try:
                self._cuda.eventRecord(event, first)
                self._cuda.streamWaitEvent(then, event)
            finally:
                self._cuda.eventDestroy(event)  # CUDA keeps what is still waited for

    def create_event(self) -> int:
        with self._telling("making an event"):
            return int(self._cuda.eventCreateWithFlags(self._cuda.eventDisableTiming | self._cuda.eventInterprocess))

    def export_event(self, event: int) -> bytes:
        with self._telling("exporting an event"):
            return bytes(self._cuda.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        with self._telling("opening another process' event"):
            return int(self._cuda.ipcOpenEventHandle(bytes(handle)))

    def destroy_event(self, event: int) -> None:
        with self._telling("destroying an event"):
            self._cuda.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        with self._telling("recording an event"):
            self._cuda.eventRecord(event, stream)

    def wait_for_event(self, event: int, stream: int) -> None:
        with self._telling("waiting for an event"):
            self._cuda.streamWaitEvent(stream, event)

    def is_event_done(self, event: int) -> bool:
        with self._telling("looking at an event"):
            status = int(self._cuda.eventQuery(event))
            if status not in (_SUCCESS, _NOT_READY):
                raise self._cuda.CUDARuntimeError(status)
        return status == _SUCCESS

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object) -> Any:
        memory = self._cupy.cuda.UnownedMemory(address, math.prod(shape) * dtype.itemsize, owner, device)
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self._telling(f"making an array of shape {shape} and type {dtype} on the GPU"):
            return self._cupy.empty(shape, dtype)

    def adopt(self, value: Any) -> Any:
        if isinstance(value, self._cupy.ndarray):
            return value
        with self._telling("taking over an array on the GPU"):
            if hasattr(value, "__dlpack__") or not hasattr(value, "__cuda_array_interface__"):
                return self._cupy.from_dlpack(value)  # takes bare capsules, too
            address, _ = value.__cuda_array_interface__["data"]
            if not address:
                return self._cupy.asarray(value)
            with device_guard(self, self._cuda.pointerGetAttributes(address).device):  # from another, CuPy would copy
                return self._cupy.asarray(value)

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def capsule(self, array: Any, stream: int | None, max_version: tuple[int, int] | None) -> Any:
        # CuPy has the consumer's stream wait for the current one of the current device, not of the array's.
        with device_guard(self, int(array.data.device_id)), self._telling("exporting an array by DLPack"):
            if max_version is not None:
                # CuPy before 13.4 does not know the argument; what it makes then, every consumer takes.
                with contextlib.suppress(TypeError):
                    return array.__dlpack__(stream=stream, max_version=max_version)
            return array.__dlpack__(stream=stream)

    def copy(self, target: Any, source: Any, stream: int) -> None:
        if target.nbytes == 0:
            return
        with self._telling(f"copying {target.nbytes} bytes"):
            if isinstance(source, np.ndarray):
                self._upload(target, source, stream)
            elif isinstance(target, np.ndarray):
                self._download(target, source, stream)
            elif target.data.device_id == source.data.device_id:
                self._copy_on_device(target, source, stream)
            else:
                self._copy_between_devices(target, source, stream)

    def _upload(self, target: Any, source: npt.NDArray[Any], stream: int) -> None:
        packed = np.ascontiguousarray(source)
        landing = target
        if not self.is_contiguous(target):
            with self._working_on(stream):
                landing = self._cupy.empty(target.shape, target.dtype)
        self._cuda.memcpyAsync(
            landing.data.ptr, packed.ctypes.data, packed.nbytes, self._cuda.memcpyHostToDevice, stream
        )
        if landing is not target:
            self._copy_on_device(target, landing, stream)
        if packed is not source or not self._is_pinned(source):
            self._cuda.streamSynchronize(stream)

    def _download(self, target: npt.NDArray[Any], source: Any, stream: int) -> None:
        if not self.is_contiguous(source):
            with self._working_on(stream):
                source = self._cupy.ascontiguousarray(source)
        landing = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
        self._cuda.memcpyAsync(
            landing.ctypes.data, source.data.ptr, landing.nbytes, self._cuda.memcpyDeviceToHost, stream
        )
        if landing is not target or not self._is_pinned(target):
            self._cuda.streamSynchronize(stream)
        if landing is not target:
            np.copyto(target, landing)

    def _is_pinned(self, host: npt.NDArray[Any]) -> bool:
        """Return whether memory is pinned. If not, CUDA says only that a copy "might" be done when the call returns."""
        return bool(self._cuda.pointerGetAttributes(host.ctypes.data).type == self._cuda.memoryTypeHost)

    def _copy_on_device(self, target: Any, source: Any, stream: int) -> None:
        if self.is_contiguous(target) and self.is_contiguous(source):
            self._cuda.memcpyAsync(
                target.data.ptr, source.data.ptr, target.nbytes, self._cuda.memcpyDeviceToDevice, stream
            )
        else:
            with self._working_on(stream):
                self._cupy.copyto(target, source)

    def _copy_between_devices(self, target: Any, source: Any, stream: int) -> None:
        to_device, from_device = target.data.device_id, source.data.device_id
        if self.is_contiguous(target) and self.is_contiguous(source):
            self._cuda.memcpyPeerAsync(target.data.ptr, to_device, source.data.ptr, from_device, target.nbytes, stream)
            return
        # A stream is one device's, and kernels must run on both. So the host waits between the steps.
        self._cuda.streamSynchronize(stream)
        packed = self._done_on(from_device, lambda: self._cupy.ascontiguousarray(source))
        landing = self._done_on(to_device, lambda: self._cupy.empty(target.shape, target.dtype))
        self._cuda.memcpyPeerAsync(landing.data.ptr, to_device, packed.data.ptr, from_device, packed.nbytes, stream)
        self._cuda.streamSynchronize(stream)
        self._done_on(to_device, lambda: self._cupy.copyto(target, landing))

    def _done_on(self, device: int, work: Callable[[], _Result]) -> _Result:
        """Do work on the current stream of a device, and wait for it."""
        with device_guard(self, device):
            result = work()
            self._cuda.streamSynchronize(self._cupy.cuda.get_current_stream().ptr)
        return result

    def _working_on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which CuPy launches on a stream, and takes memory that is given back in that order."""
        cuda = self._cupy.cuda
        is_new = hasattr(cuda.Stream, "from_external")  # since CuPy 14, where the other is deprecated
        context: contextlib.AbstractContextManager[Any] = (
            cuda.Stream.from_external(_Stream(stream)) if is_new else cuda.ExternalStream(stream)
        )
        return context

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def _ask_driver(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._driver, name)
        except (OSError, AttributeError):  # no such library, or no such function in it
            self._cuda.check_status(_INSUFFICIENT_DRIVER)
        else:
            self._cuda.check_status(function(*arguments))

    @contextlib.contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """Turn CuPy's errors into CudaError."""
        cuda = self._cupy.cuda
        try:
            yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            # Its text begins with the runtime's name of the error, whichever of the two has failed.
            name, _, _ = str(cuda.runtime.CUDARuntimeError(error.status)).partition(":")
            raise CudaError(doing, name) from error
        except cuda.memory.OutOfMemoryError as error:
            raise CudaError(doing, "cudaErrorMemoryAllocation") from error


class _Stream:
    """A stream of somebody else, as CUDA's protocol for Python has it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


def _imported_cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415  # large, and only where a GPU is used
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise MachineError(f"CuPy cannot be imported, as it lacks {error.name}; install that") from error
        raise MachineError(
            "GPU memory needs CuPy, which is not installed; install triton-shm-backend-utils[cuda], which brings "
            "cupy-cuda12x (cupy-cuda13x serves as well)"
        ) from None
    except ImportError as error:
        reason = error.__cause__ or error
        raise MachineError(
            f"CuPy is installed, but cannot be imported: {reason}; it must be the CuPy for this machine's CUDA, and "
            "the NVIDIA driver must be there"
        ) from error
    return cupy
