"""Level 1: a client's and a model's process, and no server; all checks, and what is measured."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from shm_backend_utils.gpu.streams import named_stream

from ..gpu import Gpu, LoadGpu
from ..machine import used_bytes
from ..report import Amounts, Figure, Report, identity_figures, kernel_figure, medians_ms, name_of, require
from . import memory, refusals, streams
from .client import Check, Client, ModelProcess
from .slots import DeviceSlot

MOST_OF_THE_SMALLEST: Final = 1.2

CHECKS: Final[Mapping[str, Check]] = {
    **memory.CHECKS,
    **streams.CHECKS,
    **refusals.PINNED,
    **refusals.CHECKS,
}


def _identity(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    with contextlib.ExitStack() as stack:
        cases = {"empty": _empty(client)}
        for size in amounts.identity_bytes:
            slot = stack.enter_context(client.slot("identity", size // 4, room=0))
            cases[name_of(size)] = _case(client, "identity", slot)
        medians = medians_ms(cases, amounts.rounds)
    first, last = (name_of(amounts.identity_bytes[index]) for index in (0, -1))
    return report.measured(
        *identity_figures(group, "identity", medians, amounts.identity_bytes, is_held=True, binds=False),
        Figure(
            f"identity of {last}",
            medians[last] / medians[first],
            f"× identity of {first}",
            f"{medians[last]:.4f} ms / {medians[first]:.4f} ms",
            at_most=MOST_OF_THE_SMALLEST,
            group=group,
        ),
    )


def _kernel(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    gpu, count = client.gpu, amounts.large_bytes // 4
    model = "gpu_multiply" if gpu.kernels.name == "cupy" else "quick"
    with client.slot(model, count) as slot:
        gpu.upload(slot.x, np.ones(count, np.float32))
        own = gpu.kernels.stream(0)

        def kernel_alone() -> None:
            gpu.kernels.quick(slot.x, slot.y, own)
            gpu.runtime.synchronize_stream(named_stream(own).handle, 0)

        cases: dict[str, Callable[[], object]] = {
            "empty": _empty(client),
            "kernel": kernel_alone,
            "call": _case(client, model, slot),
        }
        medians = medians_ms(cases, amounts.rounds)
    return report.measured(kernel_figure(group, gpu.kernels.name, medians, amounts.large_bytes, binds=False))


MEASURES: Final[Mapping[str, Callable[[Report, str, Client, Amounts], str]]] = {
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
        client.infer("quick", warm_up)
        gpu.download(warm_up.y)
        client.wait_until_unmapped("quick", [warm_up])
    before, used_before = model.counts(), used_bytes(gpu.runtime, 0)
    slots: list[DeviceSlot] = []
    try:
        count = amounts.region_bytes // 8
        for number in range(amounts.regions):
            slots.append(DeviceSlot.of_numbers(gpu, "quick", count))
            gpu.upload(slots[-1].x, np.full(count, number, np.float32))
        begin = time.perf_counter()
        for number in range(amounts.requests):
            client.infer("quick", slots[number % len(slots)])
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
    after, used_after = model.counts(), used_bytes(gpu.runtime, 0)
    left = (after["open"] - after["close"]) - (before["open"] - before["close"])
    require(left == 0, f"{left} handles are still open in the model's process")
    grown = used_after - used_before
    require(grown < amounts.region_bytes, f"{grown} bytes more of device memory are in use than at the start")
    return f"{amounts.requests} requests in {seconds:.1f} s, {opened} handles opened, device memory {grown:+} bytes"


def _empty(client: Client) -> Callable[[], object]:
    return lambda: client.model.infer("empty", "{}")


def _case(client: Client, model: str, slot: DeviceSlot) -> Callable[[], object]:
    return lambda: client.infer(model, slot)


def checks_of(gpu: Gpu) -> dict[str, Check]:
    """Return all that can be asked of a GPU with its library, beside others of its machine."""
    checks = dict(CHECKS)
    if gpu.kernels.name == "cupy":
        checks.update(memory.OF_CUPY)
    if gpu.runtime.device_count() > 1:
        checks.update(memory.OF_SEVERAL_GPUS)
    return checks


def check_processes(report: Report, group: str, gpu: Gpu, load_gpu: LoadGpu) -> None:
    """Run all checks of this level."""
    with ModelProcess(load_gpu) as model, Client(gpu, model) as client:
        for name, check in checks_of(gpu).items():
            report.run(group, name, functools.partial(check, client))


def measure_processes(report: Report, group: str, gpu: Gpu, load_gpu: LoadGpu, amounts: Amounts) -> None:
    """Make many requests, and measure."""
    with ModelProcess(load_gpu) as model, Client(gpu, model) as client:
        report.run(
            group,
            f"{amounts.requests} requests over {amounts.regions} regions leave nothing behind",
            lambda: many_requests(client, amounts),
        )
        for name, measure in MEASURES.items():
            report.run(group, name, functools.partial(measure, report, group, client, amounts))
