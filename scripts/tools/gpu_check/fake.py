"""A GPU that does not exist, to rehearse the check where there is none. What is measured on it says nothing."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.testing.fake_cuda.memory import KEY_PREFIX
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, FakeStream, kernel

from .gpu import Gpu

__all__ = ["gpu_on", "load_fake_gpu"]

_TOTAL_BYTES: Final = 2**40


def load_fake_gpu() -> Gpu:
    """Return a GPU of this process; its memory is another process' to map, as a real one's."""
    return gpu_on(FakeCuda())


def gpu_on(cuda: FakeCuda) -> Gpu:
    """Return a GPU that works as a fake runtime does."""
    access = CudaAccess(lambda: cuda)
    return Gpu(access, FakeCupy(cuda), _import_torch, lambda: FakeCudaSharedMemory(cuda), is_fake=True)


class FakeCupy:
    """As much of CuPy as the check and the sample models use."""

    __version__ = "none: a fake"

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = SimpleNamespace(
            Device=lambda device: device_guard(cuda, device),
            Stream=lambda non_blocking: _stream_of(cuda, non_blocking),
            runtime=SimpleNamespace(
                memGetInfo=_free_and_total,
                getDeviceProperties=lambda device: {"name": b"a fake GPU", "totalGlobalMem": _TOTAL_BYTES},
                driverGetVersion=lambda: 0,
                runtimeGetVersion=lambda: 0,
            ),
        )

    @staticmethod
    def multiply(x: FakeDeviceArray, factor: float, out: FakeDeviceArray) -> None:
        """Launch it."""
        kernel(lambda numbers, result: np.multiply(numbers, factor, out=result), x, out)

    @staticmethod
    def add(x: FakeDeviceArray, number: float, out: FakeDeviceArray) -> None:
        """Launch it."""
        kernel(lambda numbers, result: np.add(numbers, number, out=result), x, out)

    @staticmethod
    def ElementwiseKernel(  # noqa: N802  # CuPy's name
        inputs: str, output: str, operation: str, name: str
    ) -> Callable[..., None]:
        """Return a function that launches an operation on an array and some numbers, by NumPy and in its precision."""
        types, names = zip(*[parameter.split() for parameter in inputs.split(",")], strict=True)
        target, _, expression = operation.partition(" = ")
        assert output.split()[1] == target
        code = compile(expression, name, "eval")

        def launch(x: FakeDeviceArray, *numbers: float) -> None:
            *scalars, y = numbers
            constants = [np.dtype(kind).type(number) for kind, number in zip(types[1:], scalars, strict=True)]

            def run(values: npt.NDArray[Any], result: npt.NDArray[Any]) -> None:
                result[...] = eval(code, dict(zip(names, [values, *constants], strict=True)))

            kernel(run, x, y)  # type: ignore[arg-type]  # the last argument is the output

        return launch


class FakeCudaSharedMemory:
    """As much of ``tritonclient.utils.cuda_shared_memory`` as the check uses."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def create_shared_memory_region(self, triton_shm_name: str, byte_size: int, device_id: int) -> CudaAllocation:
        """Allocate it."""
        return CudaAllocation(self._cuda, byte_size, device_id)

    def get_raw_handle(self, region: CudaAllocation) -> bytes:
        """Return its handle in base64."""
        return base64.b64encode(region.handle)

    def set_shared_memory_region(self, region: CudaAllocation, values: list[npt.NDArray[Any]]) -> None:
        """Fill its beginning with one array."""
        (array,) = values
        target: Any = region.array_at(0, array.dtype, array.shape, region.byte_size)
        self._cuda.copy(target, array, self._cuda.current_stream().ptr)

    def get_contents_as_numpy(
        self, region: CudaAllocation, datatype: type[np.generic], shape: list[int]
    ) -> npt.NDArray[Any]:
        """Return a copy of its beginning."""
        source: Any = region.array_at(0, np.dtype(datatype), tuple(shape), region.byte_size)
        values: npt.NDArray[Any] = source.get()
        return values

    def destroy_shared_memory_region(self, region: CudaAllocation) -> None:
        """Free it."""
        region.free()


def _stream_of(cuda: FakeCuda, non_blocking: bool) -> FakeStream:
    assert non_blocking  # a blocking one would wait for the default stream, which the fake's streams do not
    return cuda.stream()


def _free_and_total() -> tuple[int, int]:
    """Return what is left of the memory that this process has allocated."""
    used = 0
    for path in Path("/dev/shm").glob(f"{KEY_PREFIX}{os.getpid()}-*"):
        with contextlib.suppress(FileNotFoundError):
            used += path.stat().st_size
    return _TOTAL_BYTES - used, _TOTAL_BYTES


def _import_torch() -> NoReturn:
    raise ImportError("PyTorch knows no fake GPU")
