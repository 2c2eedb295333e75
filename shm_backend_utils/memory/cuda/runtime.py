"""What this package needs of CUDA, as one small interface: all that is decided above it is tested without a GPU.

``cupy_runtime`` implements it with CuPy; ``testing.fake_cuda`` with POSIX shared memory.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ...errors import MachineError

__all__ = ["HANDLE_LENGTH", "CudaError", "CudaRuntime", "device_guard"]

HANDLE_LENGTH: Final = 64
"""Bytes of ``cudaIpcMemHandle_t`` and of ``cudaIpcEventHandle_t`` (``CUDA_IPC_HANDLE_SIZE``)."""


class CudaError(MachineError):
    """A call of the CUDA runtime failed. The message says what probably is the matter, and what to do.

    Attributes
    ----------
    name : str
        CUDA's name of the error, for example ``"cudaErrorInvalidValue"``.
    """

    def __init__(self, doing: str, name: str) -> None:
        self.name = name
        advice = _ADVICE.get(name, "see CUDA's documentation of this error")
        super().__init__(f"{doing} failed with {name}: {advice}")


_ADVICE: Final = {
    "cudaErrorMemoryAllocation": "the device has not that much memory left; use smaller or fewer calls at once",
    "cudaErrorInvalidValue": "the memory was freed by its owner, or the handle is none of this machine's GPUs",
    "cudaErrorInvalidResourceHandle": "the handle is not valid here: its owner has freed the memory, or owner and user "
    "do not share process ids and IPC (containers: --ipc=host --pid=host), or it was exported by this very process",
    "cudaErrorDeviceUninitialized": "the handle was exported by this very process, which has the memory already",
    "cudaErrorMapBufferObjectFailed": "the memory cannot be mapped: it was freed, or is on a GPU that this process "
    "cannot reach; with MIG, both processes must use the same instance",
    "cudaErrorPeerAccessUnsupported": "the memory is on another GPU, to which this one has no peer access; give model "
    "and client the same GPU",
    "cudaErrorNotSupported": "this platform has no CUDA IPC, as WSL2 and some virtual GPUs have none; use CPU regions",
    "cudaErrorInvalidDevice": "there is no such device here; see CUDA_VISIBLE_DEVICES and --gpus",
    "cudaErrorNoDevice": "no GPU is visible here; see nvidia-smi, CUDA_VISIBLE_DEVICES and --gpus",
    "cudaErrorInsufficientDriver": "the NVIDIA driver is missing, or older than CuPy's CUDA; update it, or install the "
    "CuPy for its CUDA version",
    "cudaErrorHostMemoryAlreadyRegistered": "the memory is pinned already",
    "cudaErrorIllegalAddress": "a kernel has accessed memory that is not its own; this process can use CUDA no more",
}


class CudaRuntime(ABC):
    """CUDA in this process. Thread-safe. Addresses are device pointers; streams are ``cudaStream_t`` as integers.

    Every method raises :class:`CudaError`, and must be called with the device current that it is about.
    "Array" is an array of CuPy, or what stands for it; it has ``shape``, ``dtype`` (NumPy's) and ``nbytes``.
    """

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices this process sees."""

    @abstractmethod
    def device_uuid(self, device: int) -> str:
        """Return a device's UUID: 32 lowercase hexadecimal digits. Device numbers differ between processes, this not.

        With MIG it is the UUID of the whole GPU.
        """

    @abstractmethod
    def current_device(self) -> int:
        """Return the calling thread's device."""

    @abstractmethod
    def set_device(self, device: int) -> None:
        """Set the calling thread's device."""

    @abstractmethod
    def allocate(self, byte_size: int) -> int:
        """Allocate by plain ``cudaMalloc``: memory of pools (``cudaMallocAsync``, VMM) has no legacy IPC handle."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free what :meth:`allocate` returned; waits until the device has finished with it."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """Return the IPC handle of an allocation (``cudaIpcGetMemHandle``)."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map another process' allocation and return its address here (``cudaIpcOpenMemHandle``)."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Undo :meth:`open`, after waiting until the current device, which the memory is on, has done all its work."""

    @abstractmethod
    def extent(self, address: int) -> tuple[int, int]:
        """Return beginning and byte size of the allocation that an address is in (``cuMemGetAddressRange``)."""

    @abstractmethod
    def pin(self, address: int, byte_size: int) -> None:
        """Register host memory with CUDA (``cudaHostRegister``): copies then need no staging buffer."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the calling thread's current stream, as the array library has it."""

    @abstractmethod
    def create_stream(self) -> int:
        """Return a new stream of the current device; the default stream and it do not wait for each other.

        That is ``cudaStreamNonBlocking``.
        """

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Undo :meth:`create_stream`. What is on the stream is still done, and not waited for."""

    @abstractmethod
    def stream_address(self, stream: Any) -> int:
        """Return a stream as an integer."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait until the device has done all that was put on a stream."""

    @abstractmethod
    def order(self, first: int, then: int) -> None:
        """Let all that comes later on stream ``then`` wait for what is on stream ``first`` now. The host does not."""

    @abstractmethod
    def create_event(self) -> int:
        """Return a new event that other processes can wait for, without timing (``cudaEventInterprocess``)."""

    @abstractmethod
    def export_event(self, event: int) -> bytes:
        """Return the IPC handle of an event (``cudaIpcGetEventHandle``)."""

    @abstractmethod
    def open_event(self, handle: bytes) -> int:
        """Return another process' event (``cudaIpcOpenEventHandle``)."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Undo :meth:`create_event` or :meth:`open_event`. What the event stands for is not waited for."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that is on a stream now."""

    @abstractmethod
    def wait_for_event(self, event: int, stream: int) -> None:
        """Let all that comes later on a stream wait for what the event stands for now. The host does not."""

    @abstractmethod
    def is_event_done(self, event: int) -> bool:
        """Return whether the device has done what the event stands for now (``cudaEventQuery``)."""

    @abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object) -> Any:
        """Return a C-contiguous array over memory that ``owner`` keeps alive."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array in memory of its own on the current device."""

    @abstractmethod
    def adopt(self, value: Any) -> Any:
        """Return what has ``__dlpack__``, or a capsule, as an array over the same memory."""

    @abstractmethod
    def address_of(self, array: Any) -> int:
        """Return where an array begins."""

    @abstractmethod
    def is_contiguous(self, array: Any) -> bool:
        """Return whether an array is C-contiguous."""

    @abstractmethod
    def capsule(self, array: Any, stream: int | None, max_version: tuple[int, int] | None) -> Any:
        """Return a DLPack capsule over an array; ``stream`` by the array API standard."""

    @abstractmethod
    def copy(self, target: Any, source: Any, stream: int) -> None:
        """Copy an array to another of its shape and dtype, on a stream; either may be NumPy's, not both.

        Host memory that is not pinned may be reused when this returns; pinned memory, when the stream has been
        synchronized.
        """


@contextlib.contextmanager
def device_guard(runtime: CudaRuntime, device: int) -> Iterator[None]:
    """Make a device the calling thread's for the block, and then the former one again."""
    former = runtime.current_device()
    if former == device:
        yield
        return
    runtime.set_device(device)
    try:
        yield
    finally:
        runtime.set_device(former)
