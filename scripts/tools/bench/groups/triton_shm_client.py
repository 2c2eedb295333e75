"""This library beside triton-shm-client, which makes Triton's own shared memory as easy to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import ShmClient
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient

from ...figures import Figure
from ..bench import Bench, Medians
from ..ways import OTHER_CLIENT, connect_other_client

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


def other_client(bench: Bench) -> list[Figure]:
    """Measure how much faster ShmClient is on the same arrays and the same server, over gRPC."""
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
        basis = medians.pair("compat", OTHER_CLIENT)
        figure = medians[OTHER_CLIENT] / medians["compat"]
        figures.append(Figure(name, figure, unit, basis, at_least=COMPAT_IS_FASTER))
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
    limits = {"infer": INFER_IS_FASTER.get(batch_size), "prepare": PREPARE_IS_FASTER.get(batch_size)}
    return [
        medians.ratio(
            f"{way}, multiply, batch {batch_size}",
            OTHER_CLIENT,
            way,
            f"× as fast as {OTHER_CLIENT}",
            at_least=limit,
        )
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
