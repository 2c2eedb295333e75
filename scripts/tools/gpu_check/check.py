"""The whole check: what was asked for, and a report of what was found."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import find_gpus

from .. import ROOT
from .gpu import Gpu
from .kernels import LIBRARIES
from .machine import describe, device_name
from .processes.checks import check_processes, measure_processes
from .report import Amounts, CheckFailedError, Report
from .server.checks import check_server

RESULTS: Final = ROOT / "docs" / "gpu"
TITLE: Final = "shm_backend_utils on a GPU"
TITLE_OF_A_FAKE: Final = "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
LEVELS: Final = (1, 2)
_IN_WORDS: Final = {"cupy": "CuPy", "torch": "PyTorch", "neither": "neither CuPy nor PyTorch"}


@dataclass(frozen=True)
class Wanted:
    """What is to be checked."""

    levels: Sequence[int] = LEVELS
    libraries: Sequence[str] = ()  # those that must be there, of :data:`.LIBRARIES`; empty for all that are
    server: Path | None = None  # where a server is installed, if not where this package does that


def check(load: Callable[[str], Gpu], amounts: Amounts, folder: Path | None, wanted: Wanted) -> int:
    """Check a GPU and write a report."""
    try:
        gpu = load("neither")
    except MachineError as error:
        print(f"gpu_check needs a GPU and cuda-bindings: {error}", file=sys.stderr)
        print(find_gpus(os.environ, sys.executable).text, file=sys.stderr)
        return 2
    date = time.strftime("%Y-%m-%d")
    title = TITLE_OF_A_FAKE if gpu.is_fake else TITLE
    report = Report(title, describe(gpu.runtime, date), folder or default_folder(date), is_fake=gpu.is_fake)
    gpus = _loaded(report, load, wanted.libraries)
    for library, each in gpus.items():
        if 1 in wanted.levels:
            check_processes(report, f"two processes, with {each.kernels.in_words}", each, partial(load, library))
    for library, each in list(gpus.items())[:1]:  # what is measured depends little on the library
        if 1 in wanted.levels:
            measure_processes(report, "two processes", each, partial(load, library), amounts)
    if 2 in wanted.levels:
        check_server(report, gpus, amounts, wanted.server)
    report.finish()
    return 1 if report.has_failed else 0


def default_folder(date: str) -> Path:
    """Return where the reports of this machine's first GPU are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(0).lower()).strip("-")
    return RESULTS / f"{date}-{name}"


def _loaded(report: Report, load: Callable[[str], Gpu], asked_for: Sequence[str]) -> dict[str, Gpu]:
    """Return the GPU with each library; one that was asked for and cannot be used is a failed check."""
    gpus: dict[str, Gpu] = {}
    for library in asked_for or LIBRARIES:

        def use(library: str = library) -> str:
            try:
                gpus[library] = load(library)
            except (ImportError, MachineError) as error:
                raise CheckFailedError(f"it was asked for, and cannot be used: {error}") from error
            return ""

        if asked_for:
            report.run("this machine", f"{_IN_WORDS[library]} can be used", use)
            continue
        try:
            gpus[library] = load(library)
        except (ImportError, MachineError) as error:
            report.learned(f"not checked with {_IN_WORDS[library]}", str(error))
    return gpus
