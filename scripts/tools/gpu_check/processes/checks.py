"""Level 1: a client's and a model's process, and no server."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from ..gpu import Gpu, LoadGpu
from ..measuring import Amounts
from ..report import Report
from . import events, figures, memory, pinned
from .client import Check, Client, ModelProcess

__all__ = ["CHECKS", "check_processes"]

CHECKS: Final[Mapping[str, Check]] = {
    **memory.CHECKS,
    **events.CHECKS,
    **pinned.CHECKS,
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
            lambda: figures.many_requests(client, amounts),
        )
        for measured in (figures, pinned, events):
            measured.measure(report, _GROUP, client, amounts)
