"""Check and measure this library on a real GPU. Needs NumPy, cuda-bindings and tritonclient, and no network.

Level 1 is the driver, and models in processes of their own. Level 2 is a real server, which is installed if it is not
there. The exit status is 0 if all held, 1 if something failed, and 2 if there is no GPU or no cuda-bindings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import find_gpus

from .. import ROOT
from .facts import check_driver
from .gpu import Gpu, describe, device_name, load_fake_gpu, load_gpu
from .kernels import LIBRARIES, Gate
from .report import FULL, SMALL, Amounts, CheckFailedError, Report, require

LEVELS: Final = (1, 2)


def check(
    load: Callable[[str], Gpu],
    amounts: Amounts,
    folder: Path | None,
    levels: Sequence[int] = LEVELS,
    libraries: Sequence[str] = (),
) -> int:
    """Check a GPU, with these libraries or with all that are there, and write a report; return the exit status."""
    try:
        gpu = load("neither")
    except MachineError as error:
        print(f"gpu_check needs a GPU and cuda-bindings: {error}", file=sys.stderr)
        print(find_gpus(os.environ, sys.executable).text, file=sys.stderr)
        return 2
    date = time.strftime("%Y-%m-%d")
    default = ROOT / "docs" / "gpu" / f"{date}-{re.sub(r'[^a-z0-9]+', '-', device_name(0).lower()).strip('-')}"
    report = Report(describe(gpu.runtime, date), folder or default, is_fake=gpu.is_fake)
    gpus, gate = _loaded(report, load, libraries), Gate.create()
    if 1 in levels:
        check_driver(report, gpu, partial(load, "neither"), gate)
    if gpus:
        _check_calls(report, list(gpus.values()), gate, amounts, levels)
    return int(not report.finish())


def _loaded(report: Report, load: Callable[[str], Gpu], asked_for: Sequence[str]) -> dict[str, Gpu]:
    gpus: dict[str, Gpu] = {}

    def use(library: str) -> None:
        try:
            gpus[library] = load(library)
        except (ImportError, MachineError) as error:
            if asked_for:
                raise CheckFailedError(f"it was asked for, and cannot be used: {error}") from error
            report.learned(f"not checked with {LIBRARIES[library]}", str(error))

    for library in asked_for or LIBRARIES:
        if asked_for:
            report.run("this machine", f"{LIBRARIES[library]} can be used", partial(use, library))
        else:
            use(library)
    return gpus


def _check_calls(report: Report, gpus: Sequence[Gpu], gate: Gate, amounts: Amounts, levels: Sequence[int]) -> None:
    try:
        from .server.checks import check_harness, check_server  # noqa: PLC0415  # needs tritonclient
    except ImportError as error:
        missing = f"the client needs tritonclient: {error}; docs/gpu/README.md says how to install it without a network"
        report.run("this machine", "the client can be used", partial(require, False, missing))
        return
    for level in levels:
        (check_harness if level == 1 else check_server)(report, gpus, gate, amounts)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        epilog="scripts/gpu_check --python PYTHON ... runs it with another Python than python3.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the report (default: docs/gpu/<date>-<GPU>)")
    parser.add_argument("--level", type=int, choices=LEVELS, help="run one level (default: both)")
    parser.add_argument(
        "--with",
        dest="libraries",
        action="append",
        choices=LIBRARIES,
        default=[],
        help="the array library, which must be there; may be given again (default: each that is there, and neither)",
    )
    parser.add_argument("--rehearse", action="store_true", help="do little, on a fake GPU, to test this; needs --out")
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.out is None:
        parser.error("--rehearse needs --out: its report is none of a GPU")
    load, amounts = (load_fake_gpu, SMALL) if arguments.rehearse else (load_gpu, FULL)
    levels = LEVELS if arguments.level is None else (arguments.level,)
    return check(load, amounts, arguments.out, levels, arguments.libraries)


if __name__ == "__main__":
    sys.exit(main())
