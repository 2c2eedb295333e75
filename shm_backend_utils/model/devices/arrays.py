"""Arrays on GPUs, for the calls of a session: taken over, made, copied, waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import DType
from ...memory.cuda.memory import CudaAccess
from ...memory.cuda.runtime import device_guard
from ...tensors import dlpack
from ...tensors.device_view import DeviceView
from ...tensors.view import TensorView

__all__ = ["DeviceArrays", "is_on_device"]


class DeviceArrays:
    """What calls do with GPUs.

    Parameters
    ----------
    cuda : CudaAccess
        Loaded at first use.
    device : int
        The model instance's GPU, in this process' numbers.
    """

    def __init__(self, cuda: CudaAccess, device: int) -> None:
        self.device = device
        self._cuda = cuda

    def stream(self) -> Any:
        """Return the current stream on the instance's GPU."""
        runtime = self._cuda.runtime
        with device_guard(runtime, self.device):
            return runtime.current_stream()

    def adopt(self, value: Any) -> Any:
        """Return what has ``__dlpack__``, or is a DLPack capsule, as an array of CuPy over the same memory."""
        return self._cuda.runtime.adopt(value)

    def view(self, name: str, array: Any, dtype: DType, path: str, *, writable: bool) -> DeviceView:
        """Return an array of CuPy as a view: over its own memory, or over a copy if it is not C-contiguous.

        Parameters
        ----------
        name, dtype, path, writable
            The view's.
        array : array of CuPy
            Kept alive by the view.
        """
        runtime = self._cuda.runtime
        device = device_of(array)
        if not runtime.is_contiguous(array):
            with device_guard(runtime, device):
                contiguous = runtime.empty(array.shape, dtype.numpy)
                runtime.copy(contiguous, array, self._stream())
            array = contiguous
        return DeviceView(name, array, dtype, path, runtime, device, writable=writable)

    def empty(self, name: str, shape: tuple[int, ...], dtype: DType, path: str) -> DeviceView:
        """Return new memory on the instance's GPU as a view: C-contiguous, writable, not cleared."""
        runtime = self._cuda.runtime
        with device_guard(runtime, self.device):
            array = runtime.empty(shape, dtype.numpy)
        return DeviceView(name, array, dtype, path, runtime, self.device, writable=True)

    def copy(self, target: TensorView, source: Any) -> int:
        """Copy an array, NumPy's or CuPy's, to a view; one of them is on a GPU. Return which GPU has work now."""
        runtime = self._cuda.runtime
        device = target.device if isinstance(target, DeviceView) else device_of(source)
        with device_guard(runtime, device):
            stream = self._stream()
            if not isinstance(source, np.ndarray) and device_of(source) != device:
                with device_guard(runtime, device_of(source)):
                    runtime.order(self._stream(), stream)  # what is still being written to the source comes first
            runtime.copy(target.array, source, stream)
        return device

    def copy_array(self, target: Any, source: Any) -> None:
        """Copy an array of CuPy to another one on the same GPU."""
        runtime = self._cuda.runtime
        with device_guard(runtime, device_of(source)):
            runtime.copy(target, source, self._stream())

    def to_host(self, view: DeviceView) -> npt.NDArray[Any]:
        """Return a copy in host memory, complete."""
        runtime = self._cuda.runtime
        copied = np.empty(view.shape, view.dtype)
        with device_guard(runtime, view.device):
            runtime.copy(copied, view.array, self._stream())
            runtime.synchronize(self._stream())
        return copied

    def to_device(self, view: TensorView, stream: Any) -> Any:
        """Return a copy on the instance's GPU, which is complete for all that comes later on the stream.

        From pinned memory it is made while the host goes on; else the host waits.
        """
        runtime = self._cuda.runtime
        with device_guard(runtime, self.device):
            current = self._stream()
            chosen = current if stream is None else runtime.stream_address(stream)
            copied = runtime.empty(view.shape, view.dtype)
            runtime.order(current, chosen)  # the memory may have served the current stream just before
            runtime.copy(copied, view.numpy(), chosen)
        return copied

    def synchronize(self, devices: Iterable[int]) -> None:
        """Wait until these GPUs have done what is on their current streams.

        Raises
        ------
        CudaError
            Something that was launched there has failed.
        """
        for device in devices:
            runtime = self._cuda.runtime  # not before: without devices, CUDA need not be there
            with device_guard(runtime, device):
                runtime.synchronize(self._stream())

    def _stream(self) -> int:
        runtime = self._cuda.runtime
        return runtime.stream_address(runtime.current_stream())


def is_on_device(value: Any) -> bool:
    """Return whether this is an array on a GPU."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return False
    return int(value.__dlpack_device__()[0]) in dlpack.ON_GPU


def device_of(array: Any) -> int:
    """Return the number of the GPU that an array is on."""
    return int(array.__dlpack_device__()[1])
