"""The whole check: both levels, and a report of what they found."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError

from .. import ROOT
from .gpu import Gpu, LoadGpu
from .machine import describe, gpu_name
from .measuring import Amounts
from .processes.checks import check_processes
from .report import Report
from .server.checks import check_server

__all__ = ["LEVELS", "check", "default_folder"]

RESULTS: Final = ROOT / "docs" / "gpu"
TITLE: Final = "shm_backend_utils on a GPU"
TITLE_OF_A_FAKE: Final = "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
LEVELS: Final = (1, 2)


def check(
    load: LoadGpu, amounts: Amounts, folder: Path | None, levels: Sequence[int] = LEVELS, server: Path | None = None
) -> int:
    """Check a GPU and write a report.

    Parameters
    ----------
    load : callable
        Makes the GPU, here and in the model's process.
    amounts : Amounts
        How much is done.
    folder : pathlib.Path, optional
        Where the report goes; by default one for the day and the GPU.
    levels : sequence of int
        Which to run.
    server : pathlib.Path, optional
        Where a server is installed.

    Returns
    -------
    int
        The exit status.
    """
    try:
        gpu = load()
    except MachineError as error:
        print(f"gpu_check needs a GPU and CuPy: {error}", file=sys.stderr)
        return 2
    date = time.strftime("%Y-%m-%d")
    title = TITLE_OF_A_FAKE if gpu.is_fake else TITLE
    report = Report(title, describe(gpu, date), folder or default_folder(gpu, date), is_fake=gpu.is_fake)
    if 1 in levels:
        check_processes(report, gpu, load, amounts)
    if 2 in levels:
        check_server(report, gpu, amounts, server)
    report.finish()
    return 1 if report.has_failed else 0


def default_folder(gpu: Gpu, date: str) -> Path:
    """Return where the reports of a GPU are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu_name(gpu).lower()).strip("-")
    return RESULTS / f"{date}-{name}"
