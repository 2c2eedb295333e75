"""What requests with memory of a GPU cost, and what they leave behind."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from gpu_check_client import Client, DeviceSlot
from gpu_check_report import Figure, Report, require

__all__ = ["FULL", "Amounts", "many_requests", "measure", "medians_ms", "name_of"]

MOST_OF_THE_FLOOR: Final = 1.1
MOST_OF_THE_SMALLEST: Final = 1.2
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
    multiply_bytes : int
        Of the input.
    requests, regions, region_bytes : int
        So many requests over so many regions of this size.
    """

    rounds: int
    identity_bytes: tuple[int, ...]
    multiply_bytes: int
    requests: int
    regions: int
    region_bytes: int


FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 10_000, 64, 2**22)


def measure(report: Report, group: str, client: Client, amounts: Amounts) -> None:
    """Measure what requests cost, next to an empty one over the same pipe."""
    for name, check in {
        "direct identity on a GPU, by size": lambda: _identity(report, group, client, amounts),
        "gpu_multiply over kernel and empty request": lambda: _multiply(report, group, client, amounts),
    }.items():
        report.run(group, name, check)


def _identity(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    with contextlib.ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": lambda: client.model.infer("empty", "{}")}
        for size in amounts.identity_bytes:
            cases[name_of(size)] = _case(
                client, "identity", stack.enter_context(client.slot("identity", size // 4, room=0))
            )
        medians = medians_ms(cases, amounts.rounds)
    names = [name_of(size) for size in amounts.identity_bytes]
    for name in names:
        basis = f"{medians[name]:.4f} ms / {medians['empty']:.4f} ms"
        ratio = medians[name] / medians["empty"]
        report.measured(Figure(group, f"identity of {name}", ratio, "× an empty request", None, basis))
    first, last = names[0], names[-1]
    basis = f"{medians[last]:.4f} ms / {medians[first]:.4f} ms"
    ratio = medians[last] / medians[first]
    return report.measured(
        Figure(group, f"identity of {last}", ratio, f"× identity of {first}", MOST_OF_THE_SMALLEST, basis)
    )


def _multiply(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    gpu = client.gpu
    with client.slot("gpu_multiply", amounts.multiply_bytes // 4) as slot:
        gpu.upload(slot.x, np.ones(amounts.multiply_bytes // 4, np.float32))

        def kernel_alone() -> None:
            gpu.double(slot.x, slot.y)
            gpu.wait()

        medians = medians_ms(
            {
                "empty": lambda: client.model.infer("empty", "{}"),
                "kernel": kernel_alone,
                "multiply": _case(client, "gpu_multiply", slot),
            },
            amounts.rounds,
        )
    floor = medians["kernel"] + medians["empty"]
    basis = f"{medians['multiply']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)"
    name = f"gpu_multiply of {name_of(amounts.multiply_bytes)}"
    unit = "× (the kernel alone + an empty request)"
    return report.measured(Figure(group, name, medians["multiply"] / floor, unit, MOST_OF_THE_FLOOR, basis))


def many_requests(client: Client, amounts: Amounts) -> str:
    """Check that many requests over some regions open each once, and that nothing is left when they are given up."""
    gpu, model = client.gpu, client.model
    with client.slot("gpu_multiply", 1) as warm_up:  # what CUDA itself allocates at first use is no leak
        client.infer("gpu_multiply", warm_up)
        gpu.download(warm_up.y)
    before, used_before = model.counts(), gpu.used_bytes()
    slots: list[DeviceSlot] = []
    try:
        count = amounts.region_bytes // 8
        shapes = (count,), (count,)
        for number in range(amounts.regions):
            slots.append(DeviceSlot(gpu, "gpu_multiply", *shapes, ("INPUT0", "OUTPUT0"), np.float32, 0))
            gpu.upload(slots[-1].x, np.full(count, number, np.float32))
        begin = time.perf_counter()
        for number in range(amounts.requests):
            client.infer("gpu_multiply", slots[number % len(slots)])
        seconds = time.perf_counter() - begin
        for number, slot in enumerate(slots):
            require(bool((gpu.download(slot.y) == 2 * number).all()), f"the output of slot {number} is wrong")
        opened = model.counts()["opened"] - before["opened"]
        require(opened == amounts.regions, f"the model opened {opened} handles; expected {amounts.regions}")
        client.wait_until_unmapped("gpu_multiply", slots)
    except BaseException:
        model.kill()
        raise
    finally:
        for slot in slots:
            slot.unlink()
            slot.free()
    after, used_after = model.counts(), gpu.used_bytes()
    left = (after["opened"] - after["closed"]) - (before["opened"] - before["closed"])
    require(left == 0, f"{left} handles are still open in the model's process")
    grown = used_after - used_before
    require(grown < amounts.region_bytes, f"{grown} bytes more of device memory are in use than at the start")
    return f"{amounts.requests} requests in {seconds:.1f} s, {opened} handles opened, device memory {grown:+} bytes"


def medians_ms(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every case once per round, so that whatever the machine does meanwhile hits all alike; return medians."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(-min(_WARM_UP_ROUNDS, rounds), rounds):
        for name, case in cases.items():
            begin = time.perf_counter()
            case()
            if round_number >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def name_of(byte_size: int) -> str:
    """Return a size in words."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if byte_size >= factor:
            return f"{byte_size / factor:g} {unit}"
    return f"{byte_size} B"


def _case(client: Client, model: str, slot: DeviceSlot) -> Callable[[], object]:
    return lambda: client.infer(model, slot)
