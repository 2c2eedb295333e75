"""`infer` beside tritonclient and models written with pb_utils alone, and beside triton-shm-client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient

from ...figures import Figure, in_words
from ..bench import Bench, Medians
from ..ways import (
    OTHER_CLIENT,
    OURS,
    STOCK,
    Floats,
    RegisteredPair,
    connect_other_client,
    endless,
    in_band,
    repeated,
    varying,
)

INFER_OVER_STOCK: Final[Mapping[str, Mapping[int, float]]] = {
    "grpc": {64: 0.8, 2**10: 0.8, 2**12: 0.8, 2**14: 0.8, 2**16: 0.7},
    "http": {2**10: 0.9, 2**16: 0.6},
    "asyncio": {2**10: 0.8, 2**14: 0.8, 2**16: 0.75},
}
"""At most, by bytes."""
PLAIN_BYTES: Final = (2**10, 2**16, 2**20)
PLAIN_OVER_STOCK: Final = 1.05
UNIT: Final = "× tritonclient in band with a stock model"
ROUNDS_PER_ROUND: Final = 5

MODEL: Final = "multiply"
WITHOUT_A_SESSION: Final = "stock_multiply"
IMAGE: Final = (3, 224, 224)
BATCH_SIZES: Final = (1, 2, 8, 16)
LARGEST_BATCH: Final = 16
POOL_SIZE: Final = 2

INFER_IS_FASTER: Final[Mapping[int, float]] = {1: 2.0, 16: 4.0}
"""At least, by batch size: arrays in, a view out."""
PREPARE_IS_FASTER: Final[Mapping[int, float]] = {1: 2.5, 16: 6.0}
"""At least, by batch size: filled in place."""
COMPAT_IS_FASTER: Final = 1.5
COMPAT_WITHOUT_A_SESSION: Final = 1.05
"""At most: no model is slower for the class that stands in."""


def infer_beside_stock(bench: Bench) -> list[Figure]:
    """Measure `infer` with shapes that vary beside tritonclient in band with the stock model, on the same arrays."""
    figures = [figure for protocol in bench.urls for figure in _infer_over(bench, protocol)]
    return [*figures, *asyncio.run(_infer_in_tasks(bench))]


def _infer_over(bench: Bench, protocol: str) -> list[Figure]:
    figures = []
    with ShmClient(bench.urls[protocol]) as client, bench.plain_client(protocol) as plain:
        for byte_size, limit in INFER_OVER_STOCK[protocol].items():
            ours, theirs = (endless(varying(byte_size)) for _ in range(2))

            def infer(given: Any = ours) -> float:
                x = next(given)
                with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                    return float(result["OUTPUT0"][-1])

            def plain_infer(given: Any = theirs) -> float:
                return float(plain.infer(STOCK, in_band(next(given), protocol)).as_numpy("OUTPUT0")[-1])

            name, rounds = _name(protocol, byte_size), ROUNDS_PER_ROUND * bench.amounts.rounds
            medians = bench.measure(name, {"ours": infer, "stock": plain_infer}, rounds)
            figures.append(medians.ratio(name, "ours", "stock", UNIT, at_most=limit))
    return figures


async def _infer_in_tasks(bench: Bench) -> list[Figure]:
    figures = []
    plain_client = tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url)
    async with AsyncShmClient(bench.server.grpc_url) as client, plain_client as plain:
        for byte_size, limit in INFER_OVER_STOCK["asyncio"].items():
            ours, theirs = (endless(varying(byte_size)) for _ in range(2))

            async def infer(given: Any = ours) -> float:
                x = next(given)
                with await client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                    return float(result["OUTPUT0"][-1])

            async def plain_infer(given: Any = theirs) -> float:
                return float((await plain.infer(STOCK, in_band(next(given)))).as_numpy("OUTPUT0")[-1])

            name, rounds = _name("asyncio", byte_size), ROUNDS_PER_ROUND * bench.amounts.rounds
            medians = await bench.measure_async(name, {"ours": infer, "stock": plain_infer}, rounds)
            figures.append(medians.ratio(name, "ours", "stock", UNIT, at_most=limit))
    return figures


def _name(way: str, byte_size: int) -> str:
    return f"{way}: infer, around {in_words(byte_size)}, shapes varying"


def plain_clients(bench: Bench) -> list[Figure]:
    """Measure a plain client's call of a model with a ShmSession, over that of the same model without."""
    figures = []
    with ExitStack() as stack:
        plain = stack.enter_context(bench.plain_client())
        for byte_size in PLAIN_BYTES:
            for way, request in {
                "in band": _in_band_request(byte_size),
                "by Triton's shared memory": _shared_request(stack, plain, byte_size),
            }.items():
                cases = {model: request(plain, model) for model in (OURS, STOCK)}
                name = f"a plain client, {in_words(byte_size)} {way}"
                medians = bench.measure(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
                unit = "× the same model written with pb_utils alone"
                figures.append(medians.ratio(name, OURS, STOCK, unit, at_most=PLAIN_OVER_STOCK))
    return figures


Request = Callable[[Any, str], Callable[[], object]]
"""Takes a client and a model's name; returns what makes one request."""


def _in_band_request(byte_size: int) -> Request:
    (x, *_) = repeated(byte_size)

    def request(plain: Any, model: str) -> Callable[[], object]:
        _check(model, plain.infer(model, in_band(x)).as_numpy("OUTPUT0"), x)
        return lambda: plain.infer(model, in_band(x)).as_numpy("OUTPUT0")

    return request


def _shared_request(stack: ExitStack, plain: Any, byte_size: int) -> Request:
    (x, *_) = repeated(byte_size)
    pair = RegisteredPair(stack, plain, "grpc", byte_size)
    pair.fill(x)

    def request(plain: Any, model: str) -> Callable[[], object]:
        plain.infer(model, pair.inputs, outputs=pair.outputs)
        _check(model, pair.received(x.shape), x)
        return lambda: plain.infer(model, pair.inputs, outputs=pair.outputs)

    return request


def _check(model: str, y: Any, x: Floats) -> None:
    if not np.array_equal(y, x):
        raise AssertionError(f"{model} does not give back {x.nbytes} bytes")


def other_client(bench: Bench) -> list[Figure]:
    figures: list[Figure] = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        other = stack.enter_context(closing(connect_other_client(bench.server.grpc_url)))
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
        figures.append(medians.ratio(name, OTHER_CLIENT, "compat", unit, at_least=COMPAT_IS_FASTER))
    for batch_size in BATCH_SIZES:
        medians = _compat_medians(bench, WITHOUT_A_SESSION, batch_size)
        name, unit = f"infer_shm, a model without a session, batch {batch_size}", f"× {OTHER_CLIENT}'s time"
        figures.append(medians.ratio(name, "compat", OTHER_CLIENT, unit, at_most=COMPAT_WITHOUT_A_SESSION))
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
    limits = {"infer": INFER_IS_FASTER.get(batch_size), "prepare": PREPARE_IS_FASTER.get(batch_size)}
    return [
        medians.ratio(f"{way}, multiply, batch {batch_size}", OTHER_CLIENT, way, unit, at_least=limit)
        for way, limit in limits.items()
    ]


def _compat_medians(bench: Bench, model: str, batch_size: int) -> Medians:
    images = _images(batch_size)
    with ExitStack() as stack:
        clients = {
            "compat": stack.enter_context(TritonSHMClient(bench.server.grpc_url)),
            OTHER_CLIENT: stack.enter_context(closing(connect_other_client(bench.server.grpc_url))),
        }
        cases = {name: partial(_infer, client, model, images) for name, client in clients.items()}
        for name, case in cases.items():
            _register(clients[name], model, POOL_SIZE)
            _check_doubles(name, case(), images)
        return bench.measure(f"infer_shm, {model}, batch {batch_size}", cases)


def _images(batch_size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).random((batch_size, *IMAGE), np.float32)


def _check_doubles(name: str, doubled: npt.NDArray[Any], images: npt.NDArray[np.float32]) -> None:
    if not np.array_equal(doubled, images * 2):
        raise AssertionError(f"{name} does not double a batch of {len(images)}")


def _register(client: Any, model: str, pool_size: int) -> None:
    client.register_shm_model(
        model, [("INPUT0", IMAGE, np.float32)], [("OUTPUT0", IMAGE, np.float32)], LARGEST_BATCH, pool_size
    )


def _infer(client: Any, model: str, images: Any) -> Any:
    return client.infer_shm(model, {"INPUT0": images})["OUTPUT0"]
