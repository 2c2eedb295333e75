"""Clients on fake GPUs, and what the model `fake_gpu` is asked to do with its own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import Result, ShmClient
from shm_backend_utils.region.cuda import CudaAccess
from shm_backend_utils.region.cuda_runtime import device_guard
from shm_backend_utils.testing.fake_cuda import FakeCuda, FakeDeviceArray, LiveCounts

from .eventually import eventually
from .flavours import AnyClient, Flavour

__all__ = ["MODEL", "Gpu", "ModelsGpu", "gpu_of", "models_gpu"]

MODEL: Final = "fake_gpu"
_DEFAULT_STREAM: Final = 1


class ModelsGpu(NamedTuple):
    """What the CUDA of the model's process has done so far, and what it holds."""

    opened: int
    waited: int
    open_now: int
    allocations: int


@dataclass(frozen=True)
class Gpu:
    """A client, and the CUDA of its process."""

    client: AnyClient
    cuda: FakeCuda
    url: str

    def array(self, values: npt.ArrayLike, device: int = 0) -> FakeDeviceArray:
        """Return an array that is still to be filled when this returns, as after a kernel was launched."""
        source = np.asarray(values, np.float32)
        with device_guard(self.cuda, device):
            array = self.cuda.empty(source.shape, source.dtype)
            array[...] = source
        return array

    def infer(self, deed: str, x: Any, where: Any = "cuda:0", **options: Any) -> Result:
        """Let the model do something, and its output be where it is wanted."""
        return self.client.infer(MODEL, {"X": x}, outputs={"Y": where}, parameters={"deed": deed}, **options)

    def model(self, deed: str = "tell", **parameters: Any) -> ModelsGpu:
        return models_gpu(self.url, deed, **parameters)

    def times(self, operation: str) -> int:
        """Return how often this process' CUDA was asked for something."""
        return [name for name, _ in self.cuda.log].count(operation)


def models_gpu(url: str, deed: str = "tell", **parameters: Any) -> ModelsGpu:
    """Ask the model about its CUDA, by a request that has nothing to do with any GPU."""
    with (
        ShmClient(url, path="inline", timeout_s=30) as client,
        client.infer(MODEL, {"X": np.zeros(1, np.float32)}, parameters={"deed": deed, **parameters}) as told,
    ):
        return ModelsGpu(*[int(number) for number in told["Y"]])


@contextlib.contextmanager
def gpu_of(flavour: Flavour, **options: Any) -> Iterator[Gpu]:
    """Run a client that has fake GPUs, and see that nothing of them is left."""
    cuda = FakeCuda()
    with flavour.client(cuda=CudaAccess(lambda: cuda), **options) as client:
        yield Gpu(client, cuda, flavour.url)
    for device in range(cuda.device_count()):
        with device_guard(cuda, device):
            cuda.synchronize(_DEFAULT_STREAM)  # what is on a stream keeps its arrays
    gc.collect()
    models_gpu(flavour.url, "let_go")  # the model would do it by itself, within seconds
    eventually(lambda: cuda.live == LiveCounts())
