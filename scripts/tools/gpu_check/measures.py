"""What both levels measure: calls next to an empty one, and next to their parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from shm_backend_utils.cli.common.rounds import Times, shuffled
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.streams import named_stream

from .. import ROOT
from ..figures import in_words
from .gpu import Gpu
from .report import Figure

MOST_OF_EMPTY: Final = 1.2
_MOST_OF_THE_FLOOR: Final = 1.1
_KERNELS: Final = {"cupy": "gpu_multiply", "torch": "torch.mul", "neither": "a copy on the GPU"}
"""What the kernel is that a call is measured with, by library."""

EMPTY: Final = ROOT / "scripts" / "tools" / "bench" / "models" / "empty"
"""A model that does nothing, without this library."""
_WARM_UP_ROUNDS: Final = 20
_SLOW_WARM_UP_ROUNDS: Final = 3

_Prepared = TypeVar("_Prepared")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Amounts:
    """How much is done."""

    rounds: int  # how often each case is measured
    identity_bytes: tuple[int, ...]  # from the smallest to the largest
    large_bytes: int  # of the input of everything else that is measured
    slow_rounds: int  # how often that is measured which takes tens of milliseconds
    requests: int  # so many requests over so many regions of this size
    regions: int
    region_bytes: int


FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 30, 10_000, 64, 2**22)
SMALL: Final = Amounts(3, (2**10, 2**12, 2**16), 2**16, 2, 30, 6, 2**14)


def ratio(name: str, above_ms: float, below_ms: float, unit: str, **limits: Any) -> Figure:
    return Figure(name, above_ms / below_ms, unit, f"{above_ms:.4f} ms / {below_ms:.4f} ms", **limits)


def identity_medians(
    empty: Callable[[], object],
    prepare: Callable[[int], AbstractContextManager[_Prepared]],
    call: Callable[[_Prepared], object],
    sizes: Iterable[int],
    rounds: int,
) -> dict[str, float]:
    """Return what a call takes at each size, by :func:`.in_words`, and an empty one, by "empty"."""
    with ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": empty}
        for size in sizes:
            cases[in_words(size)] = partial(call, stack.enter_context(prepare(size)))
        return medians_ms(cases, rounds)


def identity_figures(what: str, medians: Mapping[str, float], **limits: Any) -> list[Figure]:
    return [
        ratio(f"{what} of {name}", median, medians["empty"], "× an empty request", **limits)
        for name, median in medians.items()
        if name != "empty"
    ]


def kernel_alone(gpu: Gpu, x: DeviceArray, y: DeviceArray, stream: Any) -> Callable[[], None]:
    """Return a function that has the GPU write y from x, and waits for it."""

    def run() -> None:
        gpu.kernels.quick(x, y, stream)
        gpu.runtime.synchronize_stream(named_stream(stream).handle, 0)

    return run


def kernel_figure(
    gpu: Gpu,
    amounts: Amounts,
    empty: Callable[[], object],
    alone: Callable[[], object],
    call: Callable[[], object],
    *,
    binds: bool,
) -> Figure:
    """Return what a call takes that has the GPU do one thing, over its parts: the kernel alone and an empty request."""
    medians = medians_ms({"empty": empty, "kernel": alone, "call": call}, amounts.rounds)
    return Figure(
        f"{_KERNELS[gpu.kernels.name]} of {in_words(amounts.large_bytes)}",
        medians["call"] / (medians["kernel"] + medians["empty"]),
        "× (the kernel alone + an empty request)",
        f"{medians['call']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)",
        at_most=_MOST_OF_THE_FLOOR,
        binds=binds,
    )


def medians_ms(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every case once per round, after some rounds to warm up; return medians."""
    times = Times(cases)
    for round_number in range(-min(_WARM_UP_ROUNDS, rounds), rounds):
        for name in shuffled(cases, round_number):
            begin = time.perf_counter()
            cases[name]()
            times.add(name, round_number, begin)
    return times.medians()


def in_turns(cases: Mapping[str, Callable[[int], _Result]], rounds: int) -> dict[str, list[_Result]]:
    """Run every case in each round, by its number, after some rounds to warm up; return what they returned."""
    found: dict[str, list[_Result]] = {name: [] for name in cases}
    for round_number in range(-min(_SLOW_WARM_UP_ROUNDS, rounds), rounds):
        for name, case in cases.items():
            result = case(round_number)
            if round_number >= 0:
                found[name].append(result)
    return found
