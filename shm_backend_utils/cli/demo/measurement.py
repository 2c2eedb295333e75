"""Measure all paths side by side, and check that they give the same results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ..common.rounds import shuffled
from .paths import PATHS, EmptyRequest, InlinePath, Request
from .photographs import Photograph
from .wire import relay_to

__all__ = ["WARM_UP_ROUNDS", "Measurement", "measure", "measure_wire_bytes"]

WARM_UP_ROUNDS: Final = 3


@dataclass
class Measurement:
    """What was measured."""

    milliseconds: dict[str, list[float]]  # per path, one for each request
    outputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # the normalized photographs by name
    # Photographs for which the paths gave different bytes in any round.
    differing: set[str] = field(default_factory=set)

    def percentile(self, path: str, percent: float) -> float:
        """Return a path's percentile over all of its requests, in milliseconds."""
        return float(np.percentile(self.milliseconds[path], percent))


def measure(url: str, photographs: dict[str, Photograph], rounds: int, on_round: Callable[[], None]) -> Measurement:
    """Send every photograph on every path, once per round: what the machine does meanwhile hits all alike."""
    measurement = Measurement({path.name: [] for path in PATHS})
    with _placed(url, photographs) as requests:
        for round_number in range(-WARM_UP_ROUNDS, rounds):
            for photograph, by_path in requests.items():
                milliseconds, are_identical, output = _send(by_path, shuffled(by_path, round_number))
                measurement.outputs[photograph] = output
                if not are_identical:
                    measurement.differing.add(photograph)
                if round_number >= 0:
                    for path, value in milliseconds.items():
                        measurement.milliseconds[path].append(value)
            on_round()
    return measurement


def _send(by_path: dict[str, Request], order: list[str]) -> tuple[dict[str, float], bool, npt.NDArray[np.float32]]:
    """Make one request on every path; return their times, whether all results are the same bytes, and one of these."""
    milliseconds, results = {}, {}
    for path in order:
        started = time.perf_counter()
        results[path] = by_path[path]()
        milliseconds[path] = (time.perf_counter() - started) * 1e3
    del results[EmptyRequest.name]
    are_identical = len({(result.dtype, result.shape, result.tobytes()) for result in results.values()}) == 1
    output = results[InlinePath.name].copy()
    _wipe(results)
    return milliseconds, are_identical, output


def measure_wire_bytes(url: str, photographs: dict[str, Photograph]) -> dict[str, dict[str, int]]:
    """Return the bytes of one request and its response, by path and photograph."""
    with relay_to(url) as relay, _placed(relay.url, photographs) as requests:
        counts: dict[str, dict[str, int]] = {path.name: {} for path in PATHS}
        for photograph, by_path in requests.items():
            for path, request in by_path.items():
                before = relay.byte_count
                request()
                counts[path][photograph] = relay.byte_count - before
    return counts


@contextlib.contextmanager
def _placed(url: str, photographs: dict[str, Photograph]) -> Iterator[dict[str, dict[str, Request]]]:
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(path(url)) for path in PATHS]
        yield {name: {path.name: path.place(photograph) for path in paths} for name, photograph in photographs.items()}


def _wipe(results: dict[str, npt.NDArray[np.float32]]) -> None:
    """Overwrite the results that lie in shared memory, so that a request that writes nothing cannot seem right."""
    for result in results.values():
        if result.flags.writeable:
            result.fill(np.nan)
