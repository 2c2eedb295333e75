"""Level 1: a client's and a model's process, and no server."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import gpu_check_events
import gpu_check_figures
import gpu_check_memory
import gpu_check_pinned
from gpu_check_client import Check, Client, ModelProcess
from gpu_check_gpu import Gpu, LoadGpu
from gpu_check_measuring import Amounts
from gpu_check_report import Report

__all__ = ["CHECKS", "check_processes"]

CHECKS: Final[Mapping[str, Check]] = {
    **gpu_check_memory.CHECKS,
    **gpu_check_events.CHECKS,
    **gpu_check_pinned.CHECKS,
}
_GROUP: Final = "two processes"


def check_processes(report: Report, gpu: Gpu, load_gpu: LoadGpu, amounts: Amounts) -> None:
    """Run all checks of this level, and measure."""
    with ModelProcess(load_gpu) as model:
        client = Client(gpu, model)
        for name, check in CHECKS.items():
            report.run(_GROUP, name, functools.partial(check, client))
        report.run(
            _GROUP,
            f"{amounts.requests} requests over {amounts.regions} regions leave nothing behind",
            lambda: gpu_check_figures.many_requests(client, amounts),
        )
        for figures in (gpu_check_figures, gpu_check_pinned, gpu_check_events):
            figures.measure(report, _GROUP, client, amounts)
