"""DeviceView: one tensor's memory on a GPU."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..dtypes import DType
from ..errors import DeviceMemoryError
from ..memory.cuda.runtime import CudaRuntime
from . import dlpack
from .attributes import BufferAttributes, MemoryType
from .view import TensorView

__all__ = ["DeviceView"]


class DeviceView(TensorView):
    """A tensor on a GPU, where it lies: a view, never a copy.

    What is launched on ``call.stream``, which is the thread's current stream, is finished before the response leaves.

    Attributes
    ----------
    device : int
        This process' number of the GPU.
    """

    __slots__ = ("_handle", "_runtime", "_writable", "device")

    def __init__(
        self,
        name: str,
        array: Any,
        dtype: DType,
        path: str,
        runtime: CudaRuntime,
        device: int,
        *,
        writable: bool,
        handle: bytes | None = None,
    ) -> None:
        super().__init__(name, array, dtype, path, MemoryType.GPU)
        self.device = device
        self._runtime = runtime
        self._writable = writable
        self._handle = handle

    @property
    def writable(self) -> bool:
        """Whether arrays made from this view may be written to. Inputs may not, which CuPy cannot enforce."""
        return self._writable

    @property
    def attributes(self) -> BufferAttributes:
        """Where the bytes lie, and how many they are; with the IPC handle if this is a client's memory."""
        return BufferAttributes(self._memory_type, self.device, self._array.nbytes, self._handle)

    def numpy(self) -> npt.NDArray[Any]:
        """Raise: a view never copies.

        Raises
        ------
        DeviceMemoryError
            Always.
        """
        raise DeviceMemoryError(
            f"tensor {self.name!r} is in memory of GPU {self.device}, which NumPy cannot read; use .cupy() for a view, "
            "or call.to_host(view) for a copy"
        )

    def cupy(self) -> Any:
        """Return the tensor as a C-contiguous array of CuPy over this very memory."""
        return self._array

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        return dlpack.CUDA, self.device

    def __repr__(self) -> str:
        return f"<DeviceView {self.name!r} {self.triton_dtype} {list(self.shape)} GPU {self.device} path={self.path}>"

    def _capsule(self, stream: object, max_version: tuple[int, int] | None) -> Any:
        if stream is not None and (type(stream) is not int or stream < -1 or stream == 0):
            raise BufferError(
                f"stream {stream!r} is none of CUDA's; expected 1 (legacy default), 2 (per-thread default), a "
                "cudaStream_t above 2, or -1 for no synchronization"
            )
        return self._runtime.capsule(self._array, stream, max_version)
