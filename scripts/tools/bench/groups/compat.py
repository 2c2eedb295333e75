"""How fast infer_shm is by this library, and by triton-shm-client, whose class it stands in for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
from bench_figures import AtLeast, AtMost, Figure
from bench_other_client import IMAGE, LARGEST_BATCH
from bench_rounds import Bench
from triton_shm_client import TritonSHMClient as OtherClient

from shm_backend_utils.client.compat import TritonSHMClient

__all__ = ["compat"]

BATCH_SIZES: Final = (1, 2, 8, 16)
WITH_A_SESSION: Final = "multiply"
WITHOUT: Final = "ordinary_multiply"
POOL_SIZE: Final = 2


def compat(bench: Bench) -> list[Figure]:
    """Measure both on the same arrays, with a model that has a ShmSession and one that has none."""
    figures: list[Figure] = []
    for batch_size in BATCH_SIZES:
        ours, others, basis = _measured(bench, WITH_A_SESSION, batch_size)
        figures.append(
            AtLeast(
                f"infer_shm, multiply, batch {batch_size}", others / ours, "× as fast as triton-shm-client", basis, 1.5
            )
        )
    for batch_size in BATCH_SIZES:
        ours, others, basis = _measured(bench, WITHOUT, batch_size)
        figures.append(
            AtMost(
                f"infer_shm, a model without a session, batch {batch_size}",
                ours / others,
                "× triton-shm-client's time",
                basis,
                1.05,
            )
        )
    return figures


def _measured(bench: Bench, model: str, batch_size: int) -> tuple[float, float, str]:
    """Return our time, the other client's, and both in words."""
    images = np.random.default_rng(0).random((batch_size, *IMAGE), np.float32)
    with ExitStack() as stack:
        clients = {
            "compat": stack.enter_context(TritonSHMClient(bench.server.grpc_url)),
            "triton-shm-client": stack.enter_context(OtherClient(bench.server.grpc_url)),
        }
        cases = {name: partial(_infer, client, model, images) for name, client in clients.items()}
        for name, case in cases.items():
            _register(clients[name], model)
            if not np.array_equal(case(), images * 2):
                raise AssertionError(f"{name} does not double a batch of {batch_size}")
        medians = bench.measure(f"infer_shm, {model}, batch {batch_size}", cases)
    return medians["compat"], medians["triton-shm-client"], medians.pair("compat", "triton-shm-client")


def _register(client: Any, model: str) -> None:
    client.register_shm_model(
        model, [("INPUT0", IMAGE, np.float32)], [("OUTPUT0", IMAGE, np.float32)], LARGEST_BATCH, POOL_SIZE
    )


def _infer(client: Any, model: str, images: Any) -> Any:
    return client.infer_shm(model, {"INPUT0": images})["OUTPUT0"]
