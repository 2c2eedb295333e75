"""`infer` beside tritonclient and models written with pb_utils alone, and beside the same client in band."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient

from ...figures import Figure
from ..bench import Bench
from ..payloads import Floats, endless, in_band, repeated, varying
from ..ways import OURS, STOCK, RegisteredPair

INFER_OVER_STOCK: Final[Mapping[str, Mapping[int, float]]] = {
    "grpc": {64: 0.8, 2**10: 0.8, 2**12: 0.8, 2**14: 0.8, 2**16: 0.7},
    "http": {2**10: 0.9, 2**16: 0.6},
    "asyncio": {2**10: 0.8, 2**14: 0.8, 2**16: 0.75},
}
"""At most, by bytes."""
PLAIN_BYTES: Final[Mapping[str, int]] = {"1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20}
PLAIN_OVER_STOCK: Final = 1.05
UNIT: Final = "× tritonclient in band with a stock model"
ROUNDS_PER_ROUND: Final = 5


def infer_beside_stock(bench: Bench) -> list[Figure]:
    """Measure `infer` with shapes that vary beside tritonclient in band with the stock model, on the same arrays."""
    figures = [
        figure for protocol in bench.urls for figure in _infer_over(bench, protocol, INFER_OVER_STOCK[protocol].items())
    ]
    return [*figures, *asyncio.run(_infer_in_tasks(bench))]


def _infer_over(bench: Bench, protocol: str, limits: Iterable[tuple[int, float]]) -> list[Figure]:
    figures = []
    with ShmClient(bench.urls[protocol]) as client:
        plain = bench.plain_client(protocol)
        try:
            for byte_size, limit in limits:
                ours, theirs = (endless(varying(byte_size)) for _ in range(2))

                def infer(given: Any = ours) -> float:
                    x = next(given)
                    with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                        return float(result["OUTPUT0"][-1])

                def plain_infer(given: Any = theirs) -> float:
                    return float(plain.infer(STOCK, in_band(next(given), protocol)).as_numpy("OUTPUT0")[-1])

                name = _name(protocol, byte_size)
                rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
                medians = bench.measure(name, {"ours": infer, "stock": plain_infer}, rounds)
                figures.append(medians.ratio(name, "ours", "stock", UNIT, at_most=limit))
        finally:
            plain.close()
    return figures


async def _infer_in_tasks(bench: Bench) -> list[Figure]:
    figures = []
    plain = tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url)
    async with AsyncShmClient(bench.server.grpc_url) as client:
        try:
            for byte_size, limit in INFER_OVER_STOCK["asyncio"].items():
                ours, theirs = (endless(varying(byte_size)) for _ in range(2))

                async def infer(given: Any = ours) -> float:
                    x = next(given)
                    with await client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                        return float(result["OUTPUT0"][-1])

                async def plain_infer(given: Any = theirs) -> float:
                    return float((await plain.infer(STOCK, in_band(next(given)))).as_numpy("OUTPUT0")[-1])

                name = _name("asyncio", byte_size)
                rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
                medians = await bench.measure_async(name, {"ours": infer, "stock": plain_infer}, rounds)
                figures.append(medians.ratio(name, "ours", "stock", UNIT, at_most=limit))
        finally:
            await plain.close()
    return figures


def _name(way: str, byte_size: int) -> str:
    size = f"{byte_size} B" if byte_size < 2**10 else f"{byte_size >> 10} KiB"
    return f"{way}: infer, around {size}, shapes varying"


def plain_clients(bench: Bench) -> list[Figure]:
    """Measure a plain client's call of a model with a ShmSession, over that of the same model without."""
    figures = []
    with ExitStack() as stack:
        plain = bench.plain_client()
        stack.callback(plain.close)
        for size, byte_size in PLAIN_BYTES.items():
            for way, request in {
                "in band": _in_band_request(byte_size),
                "by Triton's shared memory": _shared_request(stack, plain, byte_size),
            }.items():
                cases = {model: request(plain, model) for model in (OURS, STOCK)}
                name = f"a plain client, {size} {way}"
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


SIZES: Final = {"64 B": 64, "1 KiB": 2**10, "4 KiB": 2**12, "16 KiB": 2**14, "64 KiB": 2**16}
MOST_OF_IN_BAND: Final = 1.0


def sizes(bench: Bench) -> list[Figure]:
    """Measure identities on the direct path over the same in band, for both protocols."""
    return [figure for protocol in bench.urls for figure in _sizes_over(bench, protocol)]


def _sizes_over(bench: Bench, protocol: str) -> list[Figure]:
    figures = []
    with ShmClient(bench.urls[protocol]) as client:
        for size, byte_size in SIZES.items():
            cases: dict[str, Callable[[], object]] = {
                path: partial(_infer_on, client, path, endless(repeated(byte_size))) for path in ("direct", "inline")
            }
            name = f"{protocol}: infer of {size}"
            medians = bench.measure(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
            figures.append(medians.ratio(name, "direct", "inline", "× the same in band", at_most=MOST_OF_IN_BAND))
    return figures


def _infer_on(client: ShmClient, path: Any, given: Any) -> float:
    x = next(given)
    with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}, path=path) as result:
        return float(result["OUTPUT0"][-1])
