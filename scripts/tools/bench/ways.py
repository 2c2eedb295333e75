"""The ways to send an array to a model that gives it back: this library's, those without it, and an empty request."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio
from tritonclient.utils import shared_memory

from shm_backend_utils.cli.common.registered_regions import registered_region
from shm_backend_utils.client import AsyncShmClient, ShmClient

from .bench import TRITON, Bench

Floats = npt.NDArray[np.float32]

_Given = TypeVar("_Given")

_SEED: Final = 1


class Upload(NamedTuple):
    """An array to send, and the sum of each of its rows, which is to come back."""

    x: Floats
    sums: Floats


def varying(byte_size: int) -> list[Floats]:
    """Return arrays of different lengths, so many bytes in the middle: from half of it to half as much again."""
    generator = np.random.default_rng(_SEED)
    return [generator.random(length, np.float32) for length in generator.permutation(_lengths(byte_size))]


def most_bytes(arrays: list[Floats]) -> int:
    return max(x.nbytes for x in arrays)


def uploads_of(byte_size: int) -> list[Upload]:
    """Return arrays of rows, no two of one shape, as large as those of :func:`varying`; their sums are exact."""
    generator = np.random.default_rng(_SEED)
    shapes = [
        (rows, length // rows) for length, rows in zip(_lengths(byte_size), itertools.cycle(range(8, 64)), strict=False)
    ]
    arrays = [generator.integers(0, 4, shape).astype(np.float32) for shape in generator.permutation(shapes)]
    return [Upload(x, x.sum(axis=1)) for x in arrays]


def _lengths(byte_size: int) -> npt.NDArray[Any]:
    middle = byte_size // 4
    return np.linspace(middle // 2, middle * 3 // 2, 256).astype(int)


def endless(given: list[_Given], first: int = 0) -> Iterator[_Given]:
    """Return what is given again and again, beginning with one of it."""
    return itertools.islice(itertools.cycle(given), first % len(given), None)


def in_band(x: Floats, protocol: str = "grpc") -> list[Any]:
    """Return the inputs of a request with one tensor, as tritonclient takes them, sync or aio."""
    return [TRITON[protocol].InferInput("INPUT0", list(x.shape), "FP32").set_data_from_numpy(x)]


class RegisteredPair:
    """Regions for an input and an output, registered until the stack ends; what ``infer`` takes was filled in last."""

    def __init__(
        self,
        stack: ExitStack | AsyncExitStack,
        plain: Any,
        protocol: str,
        most_bytes: int,
        names: tuple[str, str] = ("INPUT0", "OUTPUT0"),
    ) -> None:
        name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
        self.source = registered_region(stack, plain, f"{name}-in", most_bytes)
        self._target = registered_region(stack, plain, f"{name}-out", most_bytes)
        self.inputs = [TRITON[protocol].InferInput(names[0], [0], "FP32")]
        self.outputs = [TRITON[protocol].InferRequestedOutput(names[1])]

    def fill(self, x: Floats) -> None:
        shared_memory.set_shared_memory_region(self.source.handle, [x])
        self.inputs[0].set_shape(list(x.shape))
        self.inputs[0].set_shared_memory(self.source.name, x.nbytes)
        self.outputs[0].set_shared_memory(self._target.name, x.nbytes)

    def received(self, shape: tuple[int, ...]) -> Floats:
        array: Floats = shared_memory.get_contents_as_numpy(self._target.handle, np.float32, shape)
        return array


OURS: Final = "identity"
"""A model with a ShmSession."""
STOCK: Final = "stock_identity"
"""The same, written with pb_utils alone."""

Send = Callable[[Floats], None]
"""Sends an array; raises AssertionError if another one comes back."""
AsyncSend = Callable[[Floats], Awaitable[None]]
Way = Callable[[Bench, str, int], AbstractContextManager[Send]]
"""Takes the protocol, and how many bytes an array has at most."""


def check(y: Floats, x: Floats) -> None:
    if y.shape != x.shape or y[-1] != x[-1]:
        raise AssertionError("a call got another one's answer")


@contextmanager
def _infer(bench: Bench, protocol: str, most_bytes: int) -> Iterator[Send]:
    with ShmClient(bench.urls[protocol]) as client:

        def send(x: Floats) -> None:
            with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                check(result["OUTPUT0"], x)

        yield send


@contextmanager
def _in_place(bench: Bench, protocol: str, most_bytes: int) -> Iterator[Send]:
    with (
        ShmClient(bench.urls[protocol], path="direct") as client,
        client.prepare(OURS, {"INPUT0": ((most_bytes // 4,), np.float32)}) as call,
    ):
        call.inputs["INPUT0"][:] = 1

        def send(x: Floats) -> None:
            check(call.infer()["OUTPUT0"], call.inputs["INPUT0"])

        yield send


@contextmanager
def of_plain_client(model: str, bench: Bench, protocol: str, most_bytes: int) -> Iterator[Send]:
    with bench.plain_client(protocol) as plain:

        def send(x: Floats) -> None:
            check(plain.infer(model, in_band(x, protocol)).as_numpy("OUTPUT0"), x)

        yield send


@contextmanager
def by_system_shm(model: str, bench: Bench, protocol: str, most_bytes: int, callers: int = 1) -> Iterator[Send]:
    """Each caller has regions of its own."""
    with bench.plain_client(protocol) as plain, ExitStack() as stack:
        free = [RegisteredPair(stack, plain, protocol, most_bytes) for _ in range(callers)]

        def send(x: Floats) -> None:
            pair = free.pop()
            pair.fill(x)
            plain.infer(model, pair.inputs, outputs=pair.outputs)
            check(pair.received(x.shape), x)
            free.append(pair)

        yield send


@contextmanager
def _empty(bench: Bench, protocol: str, most_bytes: int) -> Iterator[Send]:
    with bench.plain_client(protocol) as plain:

        def send(x: Floats) -> None:
            plain.infer("empty", [])

        yield send


WAYS: Final[Mapping[str, Way]] = {
    "in place": _in_place,
    "ours": _infer,
    "stock": partial(of_plain_client, STOCK),
    "stock triton shm": partial(by_system_shm, STOCK),
    "empty": _empty,
}
"""By the names of their lines in the pictures."""

COMPARED: Final = ("ours", "stock")
"""What the limits are of: this library's client, and tritonclient in band with a stock model."""


@contextmanager
def for_threads(bench: Bench, protocol: str, most_bytes: int, threads: int) -> Iterator[dict[str, Send]]:
    ways = {name: WAYS[name] for name in COMPARED}
    ways["stock triton shm"] = partial(by_system_shm, STOCK, callers=threads)
    with ExitStack() as stack:
        yield {name: stack.enter_context(way(bench, protocol, most_bytes)) for name, way in ways.items()}


@asynccontextmanager
async def for_tasks(bench: Bench, most_bytes: int, tasks: int) -> AsyncIterator[dict[str, AsyncSend]]:
    """Give what tasks call, over gRPC."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncShmClient(bench.server.grpc_url))
        plain = await stack.enter_async_context(tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url))
        registrar = stack.enter_context(bench.plain_client())
        free = [RegisteredPair(stack, registrar, "grpc", most_bytes) for _ in range(tasks)]

        async def ours(x: Floats) -> None:
            with await client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                check(result["OUTPUT0"], x)

        async def stock(x: Floats) -> None:
            check((await plain.infer(STOCK, in_band(x))).as_numpy("OUTPUT0"), x)

        async def system_shm(x: Floats) -> None:
            pair = free.pop()
            pair.fill(x)
            await plain.infer(STOCK, pair.inputs, outputs=pair.outputs)
            check(pair.received(x.shape), x)
            free.append(pair)

        yield {"ours": ours, "stock": stock, "stock triton shm": system_shm}
