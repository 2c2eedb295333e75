"""Errors of the CUDA driver: names, probable causes and remedies."""

from __future__ import annotations

from typing import Final

from ..errors import MachineError

__all__ = ["CudaError"]


class CudaError(MachineError):
    """A call of the CUDA driver failed. The message names the probable cause and a remedy.

    Attributes
    ----------
    name : str
        CUDA's name of the error, for example ``"CUDA_ERROR_INVALID_VALUE"``.
    is_final : bool
        Whether no call of this process will ever succeed on that GPU again.
    is_capture : bool
        Whether the reason is a graph capture.
    """

    def __init__(self, doing: str, name: str) -> None:
        self.name = name
        self.is_final = name in _FINAL
        self.is_capture = "CAPTURE" in name
        remedy = _REMEDIES.get(name) or (_LOST if self.is_final else _UNKNOWN)
        super().__init__(f"{doing} failed with {name}: {remedy}")


_LOST: Final = "this process cannot use CUDA any more: restart it, or load the model again"
_UNKNOWN: Final = "see CUresult in CUDA's documentation of the driver API"
_CAPTURED: Final = (
    "a stream is being captured into a graph, and waiting for a GPU cannot be captured: end the capture first, or name "
    "a stream that is not part of it"
)

_REMEDIES: Final = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has not enough memory left; make smaller calls, or fewer at once",
    "CUDA_ERROR_INVALID_VALUE": "its owner has freed the memory, or it is of a GPU that is not in this machine",
    "CUDA_ERROR_INVALID_HANDLE": "the handle is not valid here: its owner has freed the memory or is dead, or owner "
    "and user do not share IPC and PID namespaces (containers: --ipc=host --pid=host)",
    "CUDA_ERROR_INVALID_CONTEXT": "the handle was exported by this very process, or by a process with the same id in "
    "another PID namespace (containers: --pid=host --ipc=host)",
    "CUDA_ERROR_MAP_FAILED": "the memory cannot be mapped: its owner has freed it or is dead, or it is on a GPU that "
    "this process cannot reach; with MIG, both processes must use the same instance",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "the memory is on another GPU, to which this one has no peer access; use the "
    "same GPU for model and client",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or platform does not support it: WSL2 and some virtual GPUs have no CUDA "
    "IPC; use host memory",
    "CUDA_ERROR_NOT_PERMITTED": "the operating system or the container does not allow it; compare the users of both "
    "processes, and check the container's security options",
    "CUDA_ERROR_NOT_INITIALIZED": "this process was forked from one that uses CUDA, which CUDA does not allow; start "
    "a new process instead (multiprocessing: the start method spawn)",
    "CUDA_ERROR_INVALID_DEVICE": "this GPU is not visible here; see CUDA_VISIBLE_DEVICES and --gpus",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible here; see nvidia-smi, CUDA_VISIBLE_DEVICES and --gpus",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process uses the GPU exclusively (compute mode), or it is being reset; "
    "see nvidia-smi",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "NVIDIA's kernel module and its driver library have different versions; "
    "restart the machine, or restart the container with the host's driver library",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the forward-compatible driver library does not support this GPU; "
    "use the driver's own libcuda.so.1",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the memory is pinned already",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": _CAPTURED,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": _CAPTURED,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _CAPTURED,
    "CUDA_ERROR_CAPTURED_EVENT": _CAPTURED,
    "CUDA_ERROR_ILLEGAL_ADDRESS": f"a kernel has accessed an invalid address; {_LOST}",
    "CUDA_ERROR_LAUNCH_FAILED": f"a kernel has failed; {_LOST}",
    "CUDA_ERROR_LAUNCH_TIMEOUT": f"a kernel took longer than this GPU allows; {_LOST}",
    "CUDA_ERROR_ASSERT": f"an assertion in a kernel has failed; {_LOST}",
    "CUDA_ERROR_ECC_UNCORRECTABLE": f"the GPU's memory has an error; {_LOST}",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "CUDA was reset in this process; do not call cudaDeviceReset here",
}

_FINAL: Final = frozenset({name for name, remedy in _REMEDIES.items() if _LOST in remedy}) | {
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
}
