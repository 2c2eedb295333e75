"""The part of CUDA's driver API that this package uses, through NVIDIA's ``cuda-bindings`` 12.x or 13.x.

Each method names the driver function that it calls. See NVIDIA's documentation of that function.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final, Literal, NamedTuple

from ..errors import MachineError
from .errors import CudaError
from .retired import Retired
from .virtual_memory import BLOCK_BYTES, VirtualMemory

__all__ = [
    "BLOCK_BYTES",
    "DEFAULT_STREAMS",
    "HANDLE_LENGTH",
    "LEGACY_STREAM",
    "PER_THREAD_STREAM",
    "CudaRuntime",
    "PointerFacts",
    "whole_blocks",
]

HANDLE_LENGTH: Final = 64
"""Bytes of ``CUipcMemHandle`` (``CU_IPC_HANDLE_SIZE``)."""

# CUDA's default streams have numbers, and belong to the current device. Array libraries write 0 for the legacy default
# stream, but the driver may read 0 as the per-thread one. So read a library's stream as `stream or LEGACY_STREAM`.
LEGACY_STREAM: Final = 1
"""The legacy default stream (``CU_STREAM_LEGACY``). It and all blocking streams wait for each other."""

PER_THREAD_STREAM: Final = 2
"""The calling thread's own default stream (``CU_STREAM_PER_THREAD``). It waits for the legacy stream only."""

DEFAULT_STREAMS: Final = frozenset({0, LEGACY_STREAM, PER_THREAD_STREAM})

_NOT_READY: Final = "CUDA_ERROR_NOT_READY"
_NO_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
# For an address that CUDA does not know, its documentation has both null attributes and an error.
_UNKNOWN_ADDRESS: Final = frozenset({"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_CONTEXT"})
_ATTRIBUTES: Final = (
    *("MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_START_ADDR", "RANGE_SIZE"),
    "IS_LEGACY_CUDA_IPC_CAPABLE",
)
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every GPU's context
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_WITHOUT_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_BLOCKING_SYNC: Final = 1  # CU_EVENT_BLOCKING_SYNC: a waiting host thread sleeps
_OF_THE_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_OF_A_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
_UNIFIED: Final = 4  # CU_MEMORYTYPE_UNIFIED
_NOT_CAPTURING: Final = 0  # CU_STREAM_CAPTURE_STATUS_NONE
_IMPLICIT: Final = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
_RECORDS_CONTEXTS: Final = 12050  # the driver has cuCtxRecordEvent since CUDA 12.5


class PointerFacts(NamedTuple):
    """CUDA's attributes of an address.

    ``managed`` memory moves between GPUs and the host; ``pinned`` memory is host memory that CUDA knows. An allocation
    is exportable if another process can open it by an IPC handle and finds ``base`` at the beginning. Memory from
    cuMemAlloc and cudaMalloc is exportable if it begins a block. Memory from the driver's pools (cudaMallocAsync), from
    virtual memory management, and managed memory is not.
    """

    kind: Literal["device", "managed", "pinned", "host"]
    device: int = 0  # 0 for host memory
    base: int = 0  # the address of the allocation; for host memory, base and byte_size are 0
    byte_size: int = 0
    is_exportable: bool = False


class CudaRuntime(VirtualMemory):
    """CUDA in this process. Thread-safe. Addresses, streams and events are integers."""

    def __init__(self, driver: Any | None = None) -> None:
        super().__init__(_imported_driver() if driver is None else driver)
        self._uuids: dict[int, str] = {}
        try:
            self._ask("starting CUDA", "cuInit", 0)
        except RuntimeError as error:  # the bindings raise this if the driver's library is missing
            raise MachineError(
                f"GPU memory needs NVIDIA's driver, but its library libcuda.so.1 was not found ({error}); install the "
                "driver, start the container with --gpus, or check LD_LIBRARY_PATH"
            ) from None
        self._version: int = self._ask("asking for the driver's version", "cuDriverGetVersion")
        self.retired = Retired()  # memory to free or unmap

    def device_count(self) -> int:
        """Return how many devices this process sees (``cuDeviceGetCount``)."""
        return int(self._ask("counting the GPUs", "cuDeviceGetCount"))

    def device_uuid(self, device: int) -> str:
        """Return a device's UUID as 32 lowercase hexadecimal digits (``cuDeviceGetUuid_v2``)."""
        uuid = self._uuids.get(device)
        if uuid is None:
            doing = f"asking for the UUID of GPU {device}"
            has_second = hasattr(self._driver, "cuDeviceGetUuid_v2")  # bindings 13 use the plain name for this function
            name = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
            found = self._ask(doing, name, self._ask(doing, "cuDeviceGet", device))
            uuid = self._uuids[device] = bytes(found.bytes).hex()
        return uuid

    def total_bytes(self, device: int) -> int:
        """Return a device's total memory, used or not (``cuDeviceTotalMem``). With MIG, it is the instance's."""
        doing = f"asking for the size of GPU {device}"
        return int(self._ask(doing, "cuDeviceTotalMem", self._ask(doing, "cuDeviceGet", device)))

    def has_memory_operations(self, device: int) -> bool:
        """Return whether a device's streams can write and wait for 64-bit words (``cuDeviceGetAttribute``)."""
        return self._has(device, "CAN_USE_64_BIT_STREAM_MEM_OPS")

    def allocate(self, byte_size: int, device: int) -> int:
        """Allocate memory, not cleared, with its size rounded up by :func:`whole_blocks` (``cuMemAlloc``)."""
        byte_size = whole_blocks(byte_size)
        with self.on(device):
            return int(self._ask(f"allocating {byte_size} bytes on GPU {device}", "cuMemAlloc", byte_size))

    def free(self, address: int, device: int) -> None:
        """Free memory of :meth:`allocate`, after all present work of this process on the device (``cuMemFree``)."""
        with self.on(device):
            self._ask("freeing GPU memory", "cuMemFree", address)

    def export(self, address: int, device: int) -> bytes:
        """Return the IPC handle of an allocation (``cuIpcGetMemHandle``)."""
        with self.on(device):
            return _bytes_of(self._ask("exporting GPU memory", "cuIpcGetMemHandle", address))

    def open(self, handle: bytes, device: int) -> int:
        """Map another process' allocation and return its address here (``cuIpcOpenMemHandle``)."""
        with self.on(device):
            found = self._filled("CUipcMemHandle", handle)
            return int(self._ask("opening another process' GPU memory", "cuIpcOpenMemHandle", found, _LAZY_PEER_ACCESS))

    def close(self, address: int, device: int) -> None:
        """Unmap memory of :meth:`open`, after all present work here on the device (``cuIpcCloseMemHandle``)."""
        with self.on(device):
            self._ask("closing another process' GPU memory", "cuIpcCloseMemHandle", address)

    def extent(self, address: int, device: int) -> tuple[int, int]:
        """Return the address and the byte size of the allocation around an address (``cuMemGetAddressRange``)."""
        with self.on(device):
            begin, byte_size = self._ask("asking for the extent of GPU memory", "cuMemGetAddressRange", address)
        return int(begin), int(byte_size)

    def pointer(self, address: int) -> PointerFacts:
        """Return CUDA's attributes of an address (``cuPointerGetAttributes``)."""
        known = self._driver.CUpointer_attribute
        attributes = [getattr(known, f"CU_POINTER_ATTRIBUTE_{name}") for name in _ATTRIBUTES]
        doing = "asking about an address"
        try:
            with self._on_any():
                found = self._ask(doing, "cuPointerGetAttributes", len(attributes), attributes, address)
        except CudaError as error:
            if error.name in _UNKNOWN_ADDRESS:
                return PointerFacts("host")
            raise
        kind, is_managed, device, base, byte_size, can_be_exported = map(int, found)
        if is_managed or kind == _UNIFIED:
            return PointerFacts("managed", device, base, byte_size)
        if kind == _OF_A_DEVICE:
            is_exportable = base % BLOCK_BYTES == 0 and bool(can_be_exported)
            return PointerFacts("device", device, base, byte_size, is_exportable)
        return PointerFacts("pinned" if kind == _OF_THE_HOST else "host")

    def pin(self, address: int, byte_size: int) -> None:
        """Register host memory with CUDA (``cuMemHostRegister``): copies then need no staging buffer."""
        with self._on_any():
            self._ask(f"pinning {byte_size} bytes of host memory", "cuMemHostRegister", address, byte_size, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin` (``cuMemHostUnregister``)."""
        with self._on_any():
            self._ask("unpinning host memory", "cuMemHostUnregister", address)

    def device_address(self, address: int, device: int) -> int:
        """Return where a device finds registered host memory (``cuMemHostGetDevicePointer``)."""
        with self.on(device):
            return int(self._ask("asking where a GPU finds host memory", "cuMemHostGetDevicePointer", address, 0))

    def copy(self, target: int, source: int, byte_size: int, stream: int) -> None:
        """Copy between addresses of any device or of the host, on a stream (``cuMemcpyAsync``)."""
        self._ask(f"copying {byte_size} bytes", "cuMemcpyAsync", target, source, byte_size, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy rows of ``width`` bytes, a pitch apart, on a stream (``cuMemcpy2DAsync``)."""
        unified = self._driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        plan = self._driver.CUDA_MEMCPY2D()
        plan.srcMemoryType = plan.dstMemoryType = unified
        plan.srcDevice, plan.srcPitch = source, source_pitch
        plan.dstDevice, plan.dstPitch = target, target_pitch
        plan.WidthInBytes, plan.Height = width, height
        self._ask(f"copying {height} rows of {width} bytes", "cuMemcpy2DAsync", plan, stream)

    def create_stream(self, device: int) -> int:
        """Return a new stream that does not synchronize with the default streams (``cuStreamCreate``)."""
        with self.on(device):
            return int(self._ask(f"making a stream of GPU {device}", "cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int, device: int) -> None:
        """Undo :meth:`create_stream` (``cuStreamDestroy``). It does not wait: work on the stream still finishes."""
        with self.on(device):
            self._ask("destroying a stream", "cuStreamDestroy", stream)

    def stream_device(self, stream: int, current: int) -> int:
        """Return the device of a stream (``cuStreamGetCtx``); the default streams 0, 1 and 2 belong to ``current``."""
        if stream in DEFAULT_STREAMS:
            return current
        doing = f"asking for the GPU of stream {stream:#x}"
        with self.current(current):
            context = self._ask(doing, "cuStreamGetCtx", stream)
        for device, known in self._contexts.copy().items():
            if int(known) == int(context):
                return device
        self._ask(doing, "cuCtxPushCurrent", context)  # it is none of this package's, for example a green one
        try:
            return int(self._ask(doing, "cuCtxGetDevice"))
        finally:
            self._ask(doing, "cuCtxPopCurrent")

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a graph (``cuStreamIsCapturing``).

        The legacy stream counts as captured while any blocking stream of the current device is: work on the legacy one
        would end that capture.
        """
        try:
            return int(self._ask("looking at a stream", "cuStreamIsCapturing", stream)) != _NOT_CAPTURING
        except CudaError as error:
            if error.name != _IMPLICIT:
                raise
            return True

    def synchronize_stream(self, stream: int, device: int) -> None:
        """Wait, asleep, until a stream of a device has finished (``cuEventSynchronize``)."""
        with self.current(device), self._beside_captures():
            event = self.create_event(device)
            try:
                self.record(event, stream)
                self.synchronize_event(event)
            finally:
                with contextlib.suppress(CudaError):  # an error of the wait tells more
                    self.destroy_event(event, device)

    def synchronize_event(self, event: int) -> None:
        """Wait, asleep, for the work before the last record of an event (``cuEventSynchronize``).

        The function ``cuStreamSynchronize`` would keep a CPU busy for the whole wait.
        """
        with self._beside_captures():
            self._ask("waiting for a stream", "cuEventSynchronize", event)

    def synchronize_device(self, device: int) -> None:
        """Wait until a device has finished all work of this process (``cuCtxSynchronize``).

        It ends every graph capture on the device. If it finds one, it raises CudaError, and the capture goes on.
        """
        with self.on(device):
            self._check_is_not_captured(device)
            self._ask(f"waiting for GPU {device}", "cuCtxSynchronize")

    def wait_beside_captures(self, device: int) -> None:
        """Wait as :meth:`synchronize_device` does, but without ending a graph capture (``cuMemAlloc``, ``cuMemFree``).

        It frees a block that it has allocated. ``cuMemFree`` waits for all work of this process on the device: CUDA's
        programming guide says so in its section on the stream-ordered memory allocator. CUDA has no other function that
        waits for all streams, of which some are unknown here, beside a capture.
        """
        try:
            block = self.allocate(BLOCK_BYTES, device)
        except CudaError as error:
            if error.name != _NO_MEMORY:
                raise
            # Otherwise nothing could be freed on a full GPU. This may end a capture of a stream that cannot be found.
            self.synchronize_device(device)
        else:
            self.free(block, device)

    def create_event(self, device: int) -> int:
        """Return a new event, without timing (``cuEventCreate``)."""
        with self.on(device):
            return int(self._ask("making an event", "cuEventCreate", _WITHOUT_TIMING | _BLOCKING_SYNC))

    def destroy_event(self, event: int, device: int) -> None:
        """Destroy an event, without waiting for it (``cuEventDestroy``)."""
        with self.on(device):
            self._ask("destroying an event", "cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Record an event behind the present work of a stream (``cuEventRecord``). Both are the current device's."""
        self._ask("recording an event", "cuEventRecord", event, stream)

    @property
    def records_devices(self) -> bool:
        """Whether :meth:`record_device` never waits."""
        return self._version >= _RECORDS_CONTEXTS

    def record_device(self, event: int, device: int) -> None:
        """Record an event behind all present work of this process on a device (``cuCtxRecordEvent``).

        A driver older than CUDA 12.5 cannot do that, so this waits for the device instead. Captures are treated as by
        :meth:`synchronize_device`.
        """
        if not self.records_devices:
            self.synchronize_device(device)
            with self.current(device):
                self.record(event, 0)
            return
        with self.on(device):
            self._check_is_not_captured(device)
            self._ask(f"recording the work of GPU {device}", "cuCtxRecordEvent", self._context(device), event)

    def wait_for_event(self, event: int, stream: int) -> None:
        """Make later work on a stream wait for the last record of an event (``cuStreamWaitEvent``)."""
        self._ask("letting a stream wait", "cuStreamWaitEvent", stream, event, 0)

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Write a 64-bit word behind all present work of a stream (``cuStreamWriteValue64``)."""
        self._ask("letting a stream write a word", "cuStreamWriteValue64", stream, address, value, 0)

    def wait_for_word(self, address: int, least: int, stream: int) -> None:
        """Make later work on a stream wait until a 64-bit word is ``least`` or more (``cuStreamWaitValue64``)."""
        self._ask("letting a stream wait for a word", "cuStreamWaitValue64", stream, address, least, 0)

    def is_event_done(self, event: int) -> bool:
        """Return whether the work before the last record of an event is done (``cuEventQuery``)."""
        return self._is_ready("looking at an event", "cuEventQuery", event)

    def is_stream_done(self, stream: int) -> bool:
        """Return whether a stream has done all its work (``cuStreamQuery``)."""
        return self._is_ready("looking at a stream", "cuStreamQuery", stream)

    def _is_ready(self, doing: str, name: str, handle: int) -> bool:
        try:
            with self._beside_captures():
                self._ask(doing, name, handle)
        except CudaError as error:
            if error.name != _NOT_READY:
                raise
            return False
        return True

    def _check_is_not_captured(self, device: int) -> None:
        """Raise CudaError if a blocking stream of the current device is being captured; others cannot be found out."""
        if self.is_capturing(LEGACY_STREAM):
            raise CudaError(f"waiting for all work on GPU {device}", _IMPLICIT)

    def _filled(self, kind: str, content: bytes) -> Any:
        """Return a driver's handle of type ``kind`` with this content, in a way that works with bindings 12 and 13."""
        handle = getattr(self._driver, kind)()
        ctypes.memmove(handle.getPtr(), content, HANDLE_LENGTH)
        return handle


def whole_blocks(byte_size: int) -> int:
    """Return a byte size rounded up to whole blocks."""
    return -(-byte_size // BLOCK_BYTES) * BLOCK_BYTES


def _bytes_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), HANDLE_LENGTH)


def _imported_driver() -> Any:
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # only where a GPU is used
    except ImportError as error:
        raise MachineError(
            f"GPU memory needs NVIDIA's cuda-bindings, which cannot be imported ({error}); run "
            "pip install 'CHECKOUT_OR_WHEEL[gpu]', or install the cuda-bindings for your CUDA's major version"
        ) from None
    return driver
