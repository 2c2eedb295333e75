"""Clients on fake GPUs, and what the models `fake_gpu…` are asked to do with theirs."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import Result, ShmClient
from shm_backend_utils.memory.cuda import bank as device_bank
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, LiveCounts
from shm_backend_utils.testing.leak_probe import ShmLeakProbe

from .eventually import eventually
from .flavours import AnyClient, Flavour, url_of
from .hand_made import DATATYPES, Claim, HandMade, Tensor, hand_made

__all__ = [
    "HAND_MADE_SIZE",
    "MODEL",
    "TWO_FLAVOURS",
    "Y_OFFSET",
    "Gpu",
    "GpuRequest",
    "Told",
    "X",
    "ask",
    "claim_of",
    "flavour_of",
    "gpu_of",
    "hand_made_for",
    "told_by",
]

MODEL: Final = "fake_gpu"
TWO_FLAVOURS: Final = ("grpc", "http aio")
"""Each protocol once, and each client: enough where neither decides what happens."""

X: Final = np.arange(1000, dtype=np.float32)
Y_OFFSET: Final = 4096
HAND_MADE_SIZE: Final = 2 * Y_OFFSET

_DEFAULT_STREAM: Final = 1
_ROUND_S: Final = 0.002
"""How often a closed client looks whether models have let go of its memory."""


class Told(NamedTuple):
    """What a model tells of its CUDA: how often it was asked for what so far, and what is open now."""

    opens: int
    waits: int
    pins: int
    launched: int
    finished: int
    open_now: int
    allocated_now: int
    pinned_now: int


@dataclass(frozen=True)
class Gpu:
    """A client, the CUDA of its process, and the model that it calls."""

    client: AnyClient
    cuda: FakeCuda
    url: str
    model: str

    def array(self, values: npt.ArrayLike, device: int = 0) -> FakeDeviceArray:
        """Return an array that is still to be filled when this returns, as after a kernel was launched."""
        source = np.asarray(values, np.float32)
        with device_guard(self.cuda, device):
            array = self.cuda.empty(source.shape, source.dtype)
            array[...] = source
        return array

    def infer(self, deed: str, x: Any, where: Any = "cuda:0", *, deed_with: Any = None, **options: Any) -> Result:
        """Let the model do something, and its output be where it is wanted."""
        parameters = {"deed": deed, **(deed_with or {})}
        return self.client.infer(self.model, {"X": x}, outputs={"Y": where}, parameters=parameters, **options)

    def told(self, deed: str = "tell", **parameters: Any) -> Told:
        return told_by(self.model, self.url, deed, **parameters)

    def times(self, operation: str) -> int:
        """Return how often this process' CUDA was asked for something."""
        return [name for name, _ in self.cuda.log].count(operation)


def ask(model: str, url: str, deed: str, **parameters: Any) -> list[int]:
    """Ask a model something by a request that has nothing to do with any GPU."""
    with (
        ShmClient(url, path="inline", timeout_s=30) as client,
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
    probe = ShmLeakProbe(pool_prefix=None)
    cuda = FakeCuda()
    with (
        patch.object(device_bank, "_ROUND_S", _ROUND_S),
        flavour.client(cuda=CudaAccess(lambda: cuda), **options) as client,
    ):
        yield Gpu(client, cuda, flavour.url, model)
    told_by(model, flavour.url, "let_go")  # the model would do it by itself, within seconds
    for device in range(cuda.device_count()):
        with device_guard(cuda, device):
            cuda.synchronize(_DEFAULT_STREAM)  # what is on a stream keeps its arrays
    _see_that(lambda: cuda.live == LiveCounts() and not probe.growth())


def _see_that(nothing_is_left: Callable[[], bool]) -> None:
    """Wait for it, at first without the garbage collector, which takes longer than most tests."""
    for _ in range(100):
        if nothing_is_left():
            return
        time.sleep(0.001)
    gc.collect()
    eventually(nothing_is_left)


class GpuRequest:
    """Memory of a fake GPU, a slot that fences it, and a valid table of both, which plain tritonclient sends.

    At the beginning of the memory is X, and at ``Y_OFFSET`` room for 2 X.
    """

    def __init__(self, cuda: FakeCuda, allocation: CudaAllocation, request: HandMade) -> None:
        self.cuda = cuda
        self.allocation = allocation
        self.request = request
        self.url = request.url
        self.region = request.region
        self.table = request.table
        self.table.regions = [claim_of(allocation)]
        self.table.inputs = [Tensor(b"X", 0, X.nbytes, 1, DATATYPES["FP32"], [X.size])]
        self.table.outputs = [Tensor(b"Y", Y_OFFSET, X.nbytes, 1)]
        request.parameters["deed"] = "double"

    @property
    def claim(self) -> Claim:
        """What the table says of the memory on the GPU."""
        return self.table.regions[0]

    def send(self) -> None:
        self.request.next()
        self.request.infer()

    @property
    def is_doubled(self) -> bool:
        """Whether Y is 2 X now."""
        return bool((self.content()[Y_OFFSET // 4 :][: X.size] == X * 2).all())

    def content(self) -> npt.NDArray[Any]:
        """Return all of the memory as it is now, writable."""
        array: Any = self.allocation.array_at(0, X.dtype, (HAND_MADE_SIZE // 4,), HAND_MADE_SIZE)
        content: npt.NDArray[Any] = array.peek()
        return content


def claim_of(allocation: CudaAllocation, fence: int = 0) -> Claim:
    """Return what a table says of memory on a GPU."""
    return Claim(2, allocation.handle, allocation.byte_size, bytes.fromhex(allocation.device_uuid), fence=fence)


@contextlib.contextmanager
def hand_made_for(server: EmbeddedServer) -> Iterator[GpuRequest]:
    cuda = FakeCuda()
    allocation = CudaAllocation(cuda, HAND_MADE_SIZE, 0)
    with hand_made(server.grpc_url, MODEL, {}, {}, tensor_count=1) as request:
        made = GpuRequest(cuda, allocation, request)
        made.content()[: X.size] = X
        yield made
    told_by(MODEL, server.grpc_url, "let_go")
    allocation.free()
