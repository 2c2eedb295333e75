"""DeviceView: one tensor in a GPU's memory."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ...dtypes import DType
from ...errors import DeviceMemoryError
from ...tensors.view import BufferAttributes, MemoryType, TensorView
from .device_array import DeviceArray

__all__ = ["DeviceView"]


class DeviceView(TensorView):
    """A tensor on a GPU: a view, never a copy.

    Every array library with DLPack or CUDA's array interface takes the view itself, or its :attr:`array`, which is a
    :class:`DeviceArray`.

    Attributes
    ----------
    device : int
        This process' number of the GPU.
    """

    __slots__ = ("_handle", "device")

    def __init__(self, name: str, array: DeviceArray, dtype: DType, path: str, *, handle: bytes | None = None) -> None:
        super().__init__(name, array, dtype, path, MemoryType.GPU)
        self.device = array.device
        self._handle = handle

    def _as_array(self) -> str:
        return "view.cupy(), or torch.from_dlpack(view), or another library's for GPUs"

    @property
    def writable(self) -> bool:
        """Whether you may write to arrays made from this view. Not to inputs, but no library enforces that on GPUs."""
        return not self._array.is_read_only

    @property
    def attributes(self) -> BufferAttributes:
        """The location and number of the bytes, and the IPC handle if a client shares the memory by CUDA IPC."""
        return BufferAttributes(self._memory_type, self.device, self._array.nbytes, self._handle)

    def numpy(self) -> npt.NDArray[Any]:
        """Raise: a view never copies.

        Raises
        ------
        DeviceMemoryError
            Always.
        """
        raise DeviceMemoryError(
            f"tensor {self.name!r} is in memory of GPU {self.device}, which NumPy cannot read; use a library for GPUs, "
            "for example torch.from_dlpack(view) or view.cupy(), or copy it by call.to_host(view)"
        )

    def cupy(self) -> Any:
        """Return the tensor as a C-contiguous CuPy array over this memory; see :meth:`DeviceArray.cupy`."""
        return self._array.cupy()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface of the memory, version 3; see :attr:`DeviceArray.__cuda_array_interface__`."""
        interface: dict[str, Any] = self._array.__cuda_array_interface__
        return interface

    def __repr__(self) -> str:
        return f"<DeviceView {self.name!r} {self.triton_dtype} {list(self.shape)} GPU {self.device} path={self.path}>"

    def _capsule(self, stream: object, max_version: tuple[int, int] | None) -> Any:
        return self._array.__dlpack__(stream=stream, max_version=max_version)
