"""`infer` beside tritonclient and models written with pb_utils alone, and beside triton-shm-client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import triton_shm_client

from shm_backend_utils.client import ShmClient
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient

from ...figures import Figure, in_words
from ..bench import Bench, Medians
from ..ways import (
    COMPARED,
    OURS,
    STOCK,
    Floats,
    by_system_shm,
    endless,
    for_tasks,
    for_threads,
    most_bytes,
    of_plain_client,
    varying,
)

_Sent = TypeVar("_Sent")

OTHER_CLIENT: Final = "triton-shm-client"

INFER_OVER_STOCK: Final[Mapping[str, Mapping[int, float]]] = {
    "grpc": {64: 0.8, 2**10: 0.8, 2**12: 0.8, 2**14: 0.8, 2**16: 0.7},
    "http": {2**10: 0.9, 2**16: 0.6},
    "asyncio": {2**10: 0.8, 2**14: 0.8, 2**16: 0.75},
}
"""At most, by bytes."""
UNIT: Final = "× tritonclient in band with a stock model"
ROUNDS_PER_ROUND: Final = 5

MODEL: Final = "multiply"
IMAGE: Final = (3, 224, 224)
BATCH_SIZES: Final = (1, 2, 8, 16)

FASTER: Final[Mapping[str, Mapping[int, float]]] = {"infer": {1: 2.0, 16: 4.0}, "prepare": {1: 2.5, 16: 6.0}}
"""At least, by batch size."""


def infer_beside_stock(bench: Bench) -> list[Figure]:
    """Measure `infer` with shapes that vary beside tritonclient in band with the stock model, on the same arrays."""
    figures = []
    for protocol in bench.urls:
        for byte_size, limit in INFER_OVER_STOCK[protocol].items():
            arrays, name = varying(byte_size), _name(protocol, byte_size)
            with for_threads(bench, protocol, most_bytes(arrays), 1) as sends:
                cases = {case: _in_turn(sends[case], arrays) for case in COMPARED}
                medians = bench.measure(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
            figures.append(medians.ratio(name, *COMPARED, UNIT, at_most=limit))
    return [*figures, *asyncio.run(_infer_in_tasks(bench))]


async def _infer_in_tasks(bench: Bench) -> list[Figure]:
    figures = []
    for byte_size, limit in INFER_OVER_STOCK["asyncio"].items():
        arrays, name = varying(byte_size), _name("asyncio", byte_size)
        async with for_tasks(bench, most_bytes(arrays), 1) as sends:
            cases = {case: _in_turn(sends[case], arrays) for case in COMPARED}
            medians = await bench.measure_async(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
        figures.append(medians.ratio(name, *COMPARED, UNIT, at_most=limit))
    return figures


def _in_turn(send: Callable[[Floats], _Sent], arrays: list[Floats]) -> Callable[[], _Sent]:
    """Return a function that sends one array after another."""
    given = endless(arrays)
    return lambda: send(next(given))


def _name(way: str, byte_size: int) -> str:
    return f"{way}: infer, around {in_words(byte_size)}, shapes varying"


def plain_clients(bench: Bench) -> list[Figure]:
    """Measure a plain client's call of a model with a ShmSession, over that of the same model without."""
    figures = []
    ways = {"in band": of_plain_client, "by Triton's shared memory": by_system_shm}
    for byte_size in (2**10, 2**16, 2**20):
        x = np.random.default_rng(0).random(byte_size // 4, np.float32)
        for words, way in ways.items():
            name = f"a plain client, {in_words(byte_size)} {words}"
            with ExitStack() as stack:
                cases = {m: partial(stack.enter_context(way(m, bench, "grpc", byte_size)), x) for m in (OURS, STOCK)}
                medians = bench.measure(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
            unit = "× the same model written with pb_utils alone"
            figures.append(medians.ratio(name, OURS, STOCK, unit, at_most=1.05))
    return figures


def other_client(bench: Bench) -> list[Figure]:
    figures: list[Figure] = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        other = stack.enter_context(closing(triton_shm_client.TritonSHMClient(bench.server.grpc_url)))
        _register(other, MODEL, pool_size=1)
        for batch_size in BATCH_SIZES:
            figures += _beside_other(bench, client, other, batch_size)
    return figures


def compat(bench: Bench) -> list[Figure]:
    """Measure infer_shm of the class that stands in for theirs, with a model that has a ShmSession and one without."""
    figures: list[Figure] = []
    for batch_size in BATCH_SIZES:
        medians = _compat_medians(bench, MODEL, batch_size)
        name, unit = f"infer_shm, multiply, batch {batch_size}", f"× as fast as {OTHER_CLIENT}"
        figures.append(medians.ratio(name, OTHER_CLIENT, "compat", unit, at_least=1.5))
    for batch_size in BATCH_SIZES:
        medians = _compat_medians(bench, "stock_multiply", batch_size)
        name, unit = f"infer_shm, a model without a session, batch {batch_size}", f"× {OTHER_CLIENT}'s time"
        figures.append(medians.ratio(name, "compat", OTHER_CLIENT, unit, at_most=1.05))
    return figures


def _beside_other(bench: Bench, client: ShmClient, other: Any, batch_size: int) -> list[Figure]:
    images = _images(batch_size)
    with client.prepare(MODEL, {"INPUT0": (images.shape, images.dtype)}) as call:
        call.inputs["INPUT0"][:] = images
        cases: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "infer": lambda: client.infer(MODEL, {"INPUT0": images})["OUTPUT0"],
            "prepare": lambda: call.infer()["OUTPUT0"],
            OTHER_CLIENT: lambda: other.infer_shm(MODEL, {"INPUT0": images})["OUTPUT0"],
        }
        for name, case in cases.items():
            _check_doubles(name, case(), images)
        medians = bench.measure(f"{OTHER_CLIENT}, batch {batch_size}", cases)
    unit = f"× as fast as {OTHER_CLIENT}"
    return [
        medians.ratio(f"{way}, multiply, batch {batch_size}", OTHER_CLIENT, way, unit, at_least=least.get(batch_size))
        for way, least in FASTER.items()
    ]


def _compat_medians(bench: Bench, model: str, batch_size: int) -> Medians:
    images = _images(batch_size)
    with ExitStack() as stack:
        clients = {
            "compat": stack.enter_context(TritonSHMClient(bench.server.grpc_url)),
            OTHER_CLIENT: stack.enter_context(closing(triton_shm_client.TritonSHMClient(bench.server.grpc_url))),
        }
        cases = {name: partial(_infer, client, model, images) for name, client in clients.items()}
        for name, case in cases.items():
            _register(clients[name], model, pool_size=2)
            _check_doubles(name, case(), images)
        return bench.measure(f"infer_shm, {model}, batch {batch_size}", cases)


def _images(batch_size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).random((batch_size, *IMAGE), np.float32)


def _check_doubles(name: str, doubled: npt.NDArray[Any], images: npt.NDArray[np.float32]) -> None:
    if not np.array_equal(doubled, images * 2):
        raise AssertionError(f"{name} does not double a batch of {len(images)}")


def _register(client: Any, model: str, pool_size: int) -> None:
    client.register_shm_model(model, [("INPUT0", IMAGE, np.float32)], [("OUTPUT0", IMAGE, np.float32)], 16, pool_size)


def _infer(client: Any, model: str, images: Any) -> Any:
    return client.infer_shm(model, {"INPUT0": images})["OUTPUT0"]
