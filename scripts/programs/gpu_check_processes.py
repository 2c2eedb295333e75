"""Level 1: a client's and a model's process, and no server."""

from __future__ import annotations

import gpu_check_figures
import gpu_check_memory
from gpu_check_client import Client, ModelProcess
from gpu_check_figures import Amounts
from gpu_check_gpu import LoadGpu
from gpu_check_report import Report

__all__ = ["MEMORY", "NUMBERS", "check_processes"]

MEMORY = "memory"
NUMBERS = "numbers"


def check_processes(report: Report, load_gpu: LoadGpu, amounts: Amounts) -> None:
    """Run all checks of this level."""
    with ModelProcess(load_gpu) as model:
        client = Client(load_gpu(), model)
        for name, check in gpu_check_memory.checks(client).items():
            report.run(MEMORY, name, check)
        report.run(
            MEMORY,
            f"{amounts.requests} requests over {amounts.regions} regions leave nothing behind",
            lambda: gpu_check_figures.many_requests(client, amounts),
        )
        gpu_check_figures.measure(report, NUMBERS, client, amounts)
