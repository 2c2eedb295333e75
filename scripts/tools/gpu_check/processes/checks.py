"""Level 1: a client's and a model's process, and no server; all checks, and what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import numpy as np

from ..gpu import Gpu, LoadGpu, used_bytes
from ..kernels import LIBRARIES
from ..report import Amounts, Figure, Report, identity_medians, ratio, require
from . import memory, refusals, streams
from .client import Check, Client, ModelProcess
from .slots import DeviceSlot

_MOST_OF_THE_SMALLEST: Final = 1.2

CHECKS: Final[Mapping[str, Check]] = {**memory.CHECKS, **streams.CHECKS, **refusals.CHECKS}


def _identity(client: Client, amounts: Amounts) -> list[Figure]:
    def slot(byte_size: int) -> AbstractContextManager[DeviceSlot]:
        return client.slot("identity", byte_size // 4, out_shape=(0,))

    medians = identity_medians(slot, client.infer, amounts.identity_bytes, amounts.rounds)
    first, *_, last = medians
    unit = f"× identity of {first}"
    return [ratio(f"identity of {last}", medians[last], medians[first], unit, at_most=_MOST_OF_THE_SMALLEST)]


MEASURES: Final[Mapping[str, Callable[[Client, Amounts], list[Figure]]]] = {
    "identity on a GPU, by size": _identity,
    "to_device from pinned memory": refusals.measure,
    "the answer with SHM_GPU_EVENTS and without": streams.measure,
}
"""What is measured in empty requests is so where there is a server."""


def many_requests(client: Client, amounts: Amounts) -> str:
    """Check that many requests over some regions open each once, and that nothing is left when they are given up."""
    gpu, model = client.gpu, client.model
    with client.slot("quick", 1) as warm_up:  # what CUDA itself allocates at first use is no leak
        client.infer(warm_up)
        gpu.download(warm_up.y)
        client.wait_until_unmapped("quick", [warm_up])
    before, used_before = model.counts(), used_bytes(gpu.runtime)
    slots: list[DeviceSlot] = []
    try:
        count = amounts.region_bytes // 8
        for number in range(amounts.regions):
            slots.append(DeviceSlot(gpu, "quick", (count,)))
            gpu.upload(slots[-1].x, np.full(count, number, np.float32))
        begin = time.perf_counter()
        for number in range(amounts.requests):
            client.infer(slots[number % len(slots)])
        seconds = time.perf_counter() - begin
        for number, slot in enumerate(slots):
            expected = gpu.kernels.after_quick(np.full(count, number, np.float32))
            client.check_output(slot, expected, f"the output of slot {number} is wrong")
        opened = model.counts()["open"] - before["open"]
        require(opened == amounts.regions, f"the model opened {opened} handles; expected {amounts.regions}")
        client.wait_until_unmapped("quick", slots)
    except BaseException:
        model.kill()
        raise
    finally:
        for slot in slots:
            slot.unlink()
            slot.free()
    after, used_after = model.counts(), used_bytes(gpu.runtime)
    left = (after["open"] - after["close"]) - (before["open"] - before["close"])
    require(left == 0, f"{left} handles are still open in the model's process")
    grown = used_after - used_before
    require(grown < amounts.region_bytes, f"{grown} bytes more of device memory are in use than at the start")
    return f"{amounts.requests} requests in {seconds:.1f} s, {opened} handles opened, device memory {grown:+} bytes"


def check_processes(report: Report, gpu: Gpu, load_gpu: LoadGpu) -> None:
    checks = dict(CHECKS)
    if gpu.runtime.device_count() > 1:
        checks.update(memory.OF_SEVERAL_GPUS)
    with ModelProcess(load_gpu) as model, Client(gpu, model) as client:
        for name, check in checks.items():
            report.run(f"two processes, with {LIBRARIES[gpu.kernels.name]}", name, partial(check, client))


def measure_processes(report: Report, gpu: Gpu, load_gpu: LoadGpu, amounts: Amounts) -> None:
    group = "two processes"
    with ModelProcess(load_gpu) as model, Client(gpu, model) as client:
        name = f"{amounts.requests} requests over {amounts.regions} regions leave nothing behind"
        report.run(group, name, partial(many_requests, client, amounts))
        for name, measure in MEASURES.items():
            report.measure(group, name, partial(measure, client, amounts))
