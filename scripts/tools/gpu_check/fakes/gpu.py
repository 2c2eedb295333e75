"""The fake GPU of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

from ..gpu import Gpu
from ..kernels import load_kernels
from .modules import install_fakes


def load_fake_gpu(library: str) -> Gpu:
    FakeDriver.load()
    if library != "neither":
        install_fakes()
    access = CudaAccess()
    return Gpu(access, load_kernels(library, access.runtime), is_fake=True)


def cuda_shared_memory(access: CudaAccess) -> Any:
    """Return as much of tritonclient's module as the check uses: that needs CUDA's runtime library."""
    from shm_backend_utils.compat.shm_util import CudaShmHandle  # noqa: PLC0415  # needs tritonclient

    return SimpleNamespace(
        create_shared_memory_region=lambda name, byte_size, device: CudaShmHandle(name, byte_size, device, access),
        get_raw_handle=lambda handle: handle.region.raw_handle,
        set_shared_memory_region=lambda handle, values: handle.write(values[0]),
        get_contents_as_numpy=lambda handle, datatype, shape: handle.read(datatype, shape),
        destroy_shared_memory_region=CudaShmHandle.destroy,
    )
