"""What the recipes' measurements have in common: a server, the ways to be compared, medians, and a table of them."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from shm_backend_utils.cli.common.rounds import shuffled
from shm_backend_utils.cli.common.server import copy_models, models_in, temporary_server
from shm_backend_utils.client import ShmClient

__all__ = ["PLAIN", "RECIPE", "compare", "plain_infer", "recipe_models", "report", "request_ways", "served"]

RECIPE: Final = "this recipe"
PLAIN: Final = "tritonclient in band, stock model"
PLAIN_SHM: Final = "Triton's own shared memory, stock model"
WARM_UP_ROUNDS: Final = 3

Ways = Mapping[str, Callable[[], npt.NDArray[Any]]]


def recipe_models(recipe: Path) -> list[Path]:
    """Return the folders of a recipe's models, and of the stock ones that they are compared with."""
    return [*models_in(recipe / "model_repository"), *models_in(recipe / "stock")]


@contextmanager
def served(recipe: Path) -> Iterator[str]:
    """Serve a recipe's models for a block; yields the gRPC address."""
    with temporary_server("example", partial(copy_models, recipe_models(recipe))) as server:
        yield server.grpc_url


def plain_infer(
    client: triton.InferenceServerClient, model: str, inputs: Mapping[str, npt.NDArray[Any]], output: str
) -> npt.NDArray[Any]:
    """Send tensors in the request, get one in the response."""
    tensors = []
    for name, array in inputs.items():
        tensors.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    answer: Any = client.infer(model, tensors)
    found: npt.NDArray[Any] = answer.as_numpy(output)
    return found


def request_ways(
    stack: ExitStack, url: str, model: str, inputs: Mapping[str, npt.NDArray[Any]], output: tuple[str, int]
) -> Ways:
    """Return ways to make one request whose tensors are ready where each way wants them; ``output``: name and bytes."""
    name, room = output
    client = stack.enter_context(ShmClient(url))
    plain = stack.enter_context(triton.InferenceServerClient(url))
    shapes = {key: (array.shape, array.dtype) for key, array in inputs.items()}
    own = stack.enter_context(client.prepare(model, shapes, outputs={name: room}, path="direct"))
    stock = stack.enter_context(client.prepare(f"{model}_stock", shapes, outputs={name: room}, path="triton-shm"))
    for key, array in inputs.items():
        own.inputs[key][...] = array
        stock.inputs[key][...] = array
    return {
        RECIPE: lambda: own.infer()[name],
        PLAIN: lambda: plain_infer(plain, f"{model}_stock", inputs, name),
        PLAIN_SHM: lambda: stock.infer()[name],
    }


def compare(ways: Ways, rounds: int) -> dict[str, float]:
    """Return the median of each way, in milliseconds, and make sure that all of them find the same."""
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name in shuffled(ways, number):
            begin = time.perf_counter()
            found[name] = ways[name]()
            if number >= 0:
                milliseconds[name].append((time.perf_counter() - begin) * 1e3)
    for name, array in found.items():
        np.testing.assert_array_equal(array, found[RECIPE], f"{name} found something else")
    return {name: statistics.median(values) for name, values in milliseconds.items()}


def report(medians: Mapping[str, float], unit: str = "ms") -> None:
    """Print a table, and what the machine had to do besides."""
    print(f"| | median, {unit} | over this recipe's |\n|---|---:|---:|")
    for name, median in medians.items():
        print(f"| {name} | {median:.3g} | {median / medians[RECIPE]:.2g} |")
    load = os.getloadavg()[0]
    print(f"\n{datetime.date.today()}, {os.cpu_count()} cores, load average {load:.1f} at the end")
