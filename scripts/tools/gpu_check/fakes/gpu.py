"""The fake GPU of a process."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

from ..gpu import Gpu
from ..kernels import load_kernels
from .modules import install_fakes


def load_fake_gpu(library: str) -> Gpu:
    """Return a fake GPU of this process; its memory is another process' to map, as a real one's."""
    FakeDriver.load()
    if library != "neither":
        install_fakes()
    access = CudaAccess()
    return Gpu(
        access,
        load_kernels(library, access.runtime),
        lambda: FakeCudaSharedMemory(access.runtime),
        is_fake=True,
    )


class FakeCudaSharedMemory:
    """As much of ``tritonclient.utils.cuda_shared_memory`` as the check uses: that needs CUDA's runtime library."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def create_shared_memory_region(self, triton_shm_name: str, byte_size: int, device_id: int) -> CudaAllocation:
        """Allocate it."""
        return CudaAllocation(self._runtime, byte_size, device_id)

    def get_raw_handle(self, region: CudaAllocation) -> bytes:
        """Return its handle in base64."""
        return base64.b64encode(region.handle)

    def set_shared_memory_region(self, region: CudaAllocation, values: list[npt.NDArray[Any]]) -> None:
        """Fill its beginning with one array."""
        (array,) = values
        self._copy(region.address, array.ctypes.data, array.nbytes)

    def get_contents_as_numpy(
        self, region: CudaAllocation, datatype: type[np.generic], shape: list[int]
    ) -> npt.NDArray[Any]:
        """Return a copy of its beginning."""
        values = np.empty(shape, datatype)
        self._copy(values.ctypes.data, region.address, values.nbytes)
        return values

    def destroy_shared_memory_region(self, region: CudaAllocation) -> None:
        """Free it."""
        region.free()

    def _copy(self, target: int, source: int, byte_size: int) -> None:
        with self._runtime.on(0):
            self._runtime.copy(target, source, byte_size, 2)
        self._runtime.synchronize_stream(2, 0)
