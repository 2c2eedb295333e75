"""Level 1: a client's and a model's process, and no server."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from ..gpu import Gpu, LoadGpu
from ..measuring import Amounts
from ..report import Report
from . import figures, memory, pinned, refusals, streams
from .client import Check, Client, ModelProcess

__all__ = ["CHECKS", "check_processes", "checks_of", "measure_processes"]

CHECKS: Final[Mapping[str, Check]] = {
    **memory.CHECKS,
    **streams.CHECKS,
    **pinned.CHECKS,
    **refusals.CHECKS,
}


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
            lambda: figures.many_requests(client, amounts),
        )
        for measured in (figures, pinned, streams):
            measured.measure(report, group, client, amounts)
