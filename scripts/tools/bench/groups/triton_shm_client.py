"""How much faster this client is than triton-shm-client, which makes Triton's own shared memory as easy to use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bench_figures import AtLeast, Figure
from bench_rounds import Bench
from triton_shm_client import TritonSHMClient

from shm_backend_utils.client import ShmClient

__all__ = ["other_client"]

MODEL: Final = "multiply"
IMAGE: Final = (3, 224, 224)
LARGEST_BATCH: Final = 16
INFER_IS_FASTER: Final = {1: 2.0, 2: 2.0, 8: 3.0, 16: 3.0}
"""At least, by batch size: arrays in, a view out."""
PREPARE_IS_FASTER: Final = {1: 2.0, 2: 2.0, 8: 5.0, 16: 5.0}
"""At least, by batch size: filled in place."""


def other_client(bench: Bench) -> list[Figure]:
    """Measure both on the same arrays and the same server, over gRPC."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        other = _prepared_other(stack, bench.server.grpc_url)
        for batch_size in INFER_IS_FASTER:
            figures += _at(bench, client, other, batch_size)
    return figures


def _at(bench: Bench, client: ShmClient, other: Any, batch_size: int) -> list[Figure]:
    images = np.random.default_rng(0).random((batch_size, *IMAGE), np.float32)
    expected = images * 2
    with client.prepare(MODEL, {"INPUT0": (images.shape, images.dtype)}) as call:
        call.inputs["INPUT0"][:] = images
        cases: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "infer": lambda: client.infer(MODEL, {"INPUT0": images})["OUTPUT0"],
            "prepare": lambda: call.infer()["OUTPUT0"],
            "triton-shm-client": lambda: other.infer_shm(MODEL, {"INPUT0": images})["OUTPUT0"],
        }
        for name, case in cases.items():
            if not np.array_equal(case(), expected):
                raise AssertionError(f"{name} does not double a batch of {batch_size}")
        medians = bench.measure(f"triton-shm-client, batch {batch_size}", cases)
    limits = {"infer": INFER_IS_FASTER[batch_size], "prepare": PREPARE_IS_FASTER[batch_size]}
    return [
        AtLeast(
            f"{way}, multiply, batch {batch_size}",
            medians["triton-shm-client"] / medians[way],
            "× as fast as triton-shm-client",
            medians.pair("triton-shm-client", way),
            limit,
        )
        for way, limit in limits.items()
    ]


def _prepared_other(stack: ExitStack, url: str) -> Any:
    client = TritonSHMClient(url)
    stack.callback(client.close)
    client.register_shm_model(
        model_name=MODEL,
        inputs=[("INPUT0", IMAGE, np.float32)],
        outputs=[("OUTPUT0", IMAGE, np.float32)],
        max_batch_size=LARGEST_BATCH,
        pool_size=1,
    )
    return client
