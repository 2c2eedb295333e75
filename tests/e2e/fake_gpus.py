"""Clients on fake GPUs, and what the models `fake_gpu…` are asked to do with theirs."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import PoolOptions, Result, ShmClient
from shm_backend_utils.gpu.memory import bank as device_bank
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from shm_backend_utils.testing.fake_cuda.tensor import Tensor
from shm_backend_utils.testing.leak_probe import ShmLeakProbe

from .eventually import eventually
from .flavours import AnyClient, Flavour, url_of

DRIVER: Final = FakeDriver.load()
MODEL: Final = "fake_gpu"

X: Final = np.arange(1000, dtype=np.float32)

_ROUND_S: Final = 0.002
"""How often a closed client looks whether models have let go of its memory."""


class Told(NamedTuple):
    """What a model tells of its CUDA: how often it has opened memory, what is open now, what was undefined."""

    opens: int
    launched: int
    finished: int
    open_now: int
    violations: int


@dataclass
class Gpu:
    """A client, the CUDA of its process, and the model that it calls."""

    client: AnyClient
    cuda: CudaRuntime
    url: str
    model: str
    streams: tuple[int, ...]
    made: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def array(self, values: npt.ArrayLike, device: int = 0) -> Tensor:
        """Return a tensor that is still to be filled when this returns, as after a kernel was launched."""
        self.made += 1
        return DRIVER.tensor(np.asarray(values, np.float32), device=device, stream=self.streams[device])

    def kept_array(self, values: npt.ArrayLike) -> Tensor:
        """Return a tensor that is kept until the client has ended: to free it would wait for all that is on the GPU."""
        self.kept.append(self.array(values))
        return self.kept[-1]

    @property
    def allocations(self) -> int:
        return DRIVER.count("cuMemCreate") + DRIVER.count("cuIpcGetMemHandle")  # by descriptor, and by CUDA IPC

    def fill(self, array: Any, values: Any) -> None:
        memory, value = DRIVER.memory(array.address, array.shape, array.dtype), np.asarray(values)
        with self.cuda.on(array.device):
            DRIVER.launch(self.streams[array.device], lambda: np.copyto(memory, value))

    def infer(self, deed: str, x: Any, where: Any = "cuda:0", *, deed_with: Any = None, **options: Any) -> Result:
        """Let the model do something, and its output be where it is wanted."""
        parameters = {"deed": deed, **(deed_with or {})}
        return self.client.infer(self.model, {"X": x}, outputs={"Y": where}, parameters=parameters, **options)

    def told(self, deed: str = "tell", **parameters: Any) -> Told:
        return told_by(self.model, self.url, deed, **parameters)

    def times(self, function: str) -> int:
        return DRIVER.count(function)

    def finish(self) -> None:
        for device in range(len(self.streams)):
            self.cuda.synchronize_device(device)


def content_of(array: Any) -> npt.NDArray[Any]:
    """Return what is in an array on a GPU now, without waiting for anything."""
    found: npt.NDArray[Any] = DRIVER.memory(array.address, array.shape, array.dtype).copy()
    return found


def left_here() -> LiveCounts:
    """Return what this process has not given back, but for idle streams."""
    return DRIVER.live()._replace(streams=0)


def ask(model: str, url: str, deed: str, **parameters: Any) -> list[int]:
    """Ask a model something by a request that has nothing to do with any GPU."""
    with (
        ShmClient(url, path="inline", timeout_s=30, pool=PoolOptions(region="system")) as client,
        client.infer(
            model, {"X": np.zeros(1, np.float32)}, outputs=["Y"], parameters={"deed": deed, **parameters}
        ) as told,
    ):
        return [int(number) for number in told["Y"]]


def told_by(model: str, url: str, deed: str = "tell", **parameters: Any) -> Told:
    """Let a model do something that ends in telling about its CUDA."""
    return Told(*ask(model, url, deed, **parameters))


def flavour_of(server: EmbeddedServer, name: str = "grpc") -> Flavour:
    protocol, _, kind = name.partition(" ")
    return Flavour(url_of(server, protocol), kind == "aio")


@contextlib.contextmanager
def gpu_of(flavour: Flavour, model: str = MODEL, **options: Any) -> Iterator[Gpu]:
    """Run a client that has fake GPUs, and see that nothing of them is left."""
    gc.collect()
    probe = ShmLeakProbe(pool_prefix=None)
    DRIVER.forget()
    before = left_here()
    cuda = DRIVER.runtime()
    streams = tuple(cuda.create_stream(device) for device in range(cuda.device_count()))
    with (
        patch.object(device_bank, "_ROUND_S", _ROUND_S),
        flavour.client(cuda=CudaAccess(lambda: cuda), **options) as client,
    ):
        gpu = Gpu(client, cuda, flavour.url, model, streams)
        yield gpu
    gpu.finish()
    gpu.kept.clear()
    for device, stream in enumerate(streams):
        cuda.destroy_stream(stream, device)
    told = told_by(model, flavour.url, "let_go")  # the model would do it by itself, within seconds
    _see_that(lambda: not cuda.retired.collect() and not _more_than(before) and not probe.growth())
    assert (DRIVER.violations(), told.violations) == ([], 0)


def _more_than(before: LiveCounts) -> bool:
    """Return whether more is left here than was before: what another test left may have gone meanwhile."""
    return any(now > then for now, then in zip(left_here(), before, strict=True))


def _see_that(nothing_is_left: Callable[[], bool]) -> None:
    """Wait for it, at first without the garbage collector, which takes longer than most tests."""
    for _ in range(100):
        if nothing_is_left():
            return
        time.sleep(0.001)
    gc.collect()
    eventually(nothing_is_left)
