"""How the GPU check measures, how much, and what the figures are held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shm_backend_utils.cli.common.rounds import Times, shuffled

from .report import Figure

__all__ = ["FULL", "SMALL", "Amounts", "identity_figures", "kernel_figure", "medians_ms", "name_of"]

MOST_OF_EMPTY: Final = 1.2
MOST_OF_THE_FLOOR: Final = 1.1
KERNELS: Final = {"cupy": "gpu_multiply", "torch": "torch.mul", "neither": "a copy on the GPU"}
"""What the kernel is that a call is measured with, by library."""

_WARM_UP_ROUNDS: Final = 20


@dataclass(frozen=True)
class Amounts:
    """How much is done.

    Attributes
    ----------
    rounds : int
        How often each case is measured.
    identity_bytes : tuple of int
        From the smallest to the largest.
    large_bytes : int
        Of the input of everything else that is measured.
    slow_rounds : int
        How often that is measured which takes tens of milliseconds.
    requests, regions, region_bytes : int
        So many requests over so many regions of this size.
    """

    rounds: int
    identity_bytes: tuple[int, ...]
    large_bytes: int
    slow_rounds: int
    requests: int
    regions: int
    region_bytes: int


FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 30, 10_000, 64, 2**22)
SMALL: Final = Amounts(3, (2**10, 2**12, 2**16), 2**16, 2, 30, 6, 2**14)


def medians_ms(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every case once per round, after some rounds to warm up; return medians."""
    times = Times(cases)
    for round_number in range(-min(_WARM_UP_ROUNDS, rounds), rounds):
        for name in shuffled(cases, round_number):
            begin = time.perf_counter()
            cases[name]()
            times.add(name, round_number, begin)
    return times.medians()


def identity_figures(
    group: str, what: str, medians: Mapping[str, float], sizes: Sequence[int], *, is_held: bool, binds: bool
) -> list[Figure]:
    """Return what identity takes at each size, over an empty request; medians are by :func:`name_of` and "empty"."""
    return [
        Figure(
            f"{what} of {name}",
            medians[name] / medians["empty"],
            "× an empty request",
            f"{medians[name]:.4f} ms / {medians['empty']:.4f} ms",
            at_most=MOST_OF_EMPTY if is_held else None,
            group=group,
            binds=binds,
        )
        for name in map(name_of, sizes)
    ]


def kernel_figure(group: str, library: str, medians: Mapping[str, float], byte_size: int, *, binds: bool) -> Figure:
    """Return what a call takes that has the GPU do one thing, over its parts; of "call", "kernel" and "empty"."""
    floor = medians["kernel"] + medians["empty"]
    return Figure(
        f"{KERNELS[library]} of {name_of(byte_size)}",
        medians["call"] / floor,
        "× (the kernel alone + an empty request)",
        f"{medians['call']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)",
        at_most=MOST_OF_THE_FLOOR,
        group=group,
        binds=binds,
    )


def name_of(byte_size: int) -> str:
    """Return a size in words."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if byte_size >= factor:
            return f"{byte_size / factor:g} {unit}"
    return f"{byte_size} B"
