"""Level 1: a client's and a model's process, and no server; all checks, and what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import numpy as np

from ...figures import in_words
from ..gpu import Gpu, LoadGpu, used_bytes
from ..kernels import LIBRARIES
from ..measures import MOST_OF_EMPTY, Amounts, identity_figures, identity_medians, kernel_alone, kernel_figure, ratio
from ..report import Figure, Report, require
from . import memory, refusals, streams
from .client import Check, Client, ModelProcess
from .slots import DeviceSlot

_MOST_OF_THE_SMALLEST: Final = 1.2

CHECKS: Final[Mapping[str, Check]] = {**memory.CHECKS, **streams.CHECKS, **refusals.CHECKS}


def _identity(client: Client, amounts: Amounts) -> list[Figure]:
    def slot(byte_size: int) -> AbstractContextManager[DeviceSlot]:
        return client.slot("identity", byte_size // 4, out_shape=(0,))

    medians = identity_medians(client.infer_nothing, slot, client.infer, amounts.identity_bytes, amounts.rounds)
    first, last = (in_words(amounts.identity_bytes[index]) for index in (0, -1))
    unit = f"× identity of {first}"
    return [
        *identity_figures("identity", medians, at_most=MOST_OF_EMPTY, binds=False),
        ratio(f"identity of {last}", medians[last], medians[first], unit, at_most=_MOST_OF_THE_SMALLEST),
    ]


def _kernel(client: Client, amounts: Amounts) -> list[Figure]:
    gpu, count = client.gpu, amounts.large_bytes // 4
    with client.slot("gpu_multiply" if gpu.kernels.name == "cupy" else "quick", count) as slot:
        gpu.upload(slot.x, np.ones(count, np.float32))
        alone = kernel_alone(gpu, slot.x, slot.y, gpu.kernels.stream(0))
        call = partial(client.infer, slot)
        return [kernel_figure(gpu, amounts, client.infer_nothing, alone, call, binds=False)]


MEASURES: Final[Mapping[str, Callable[[Client, Amounts], list[Figure]]]] = {
    "identity on a GPU, by size": _identity,
    "a kernel and its parts": _kernel,
    "to_device from pinned memory": refusals.measure,
    "the answer with SHM_GPU_EVENTS and without": streams.measure,
}
"""What requests cost, next to an empty one over the same pipe, which costs a fraction of what it costs with a server.

What is measured in empty requests is shown beside its limit here, and held to it where there is a server.
"""


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
    """Run all checks that there are with the library, on one GPU and on several."""
    checks = dict(CHECKS)
    if gpu.kernels.name == "cupy":
        checks.update(memory.OF_CUPY)
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
