"""Check and measure this library on a real GPU. Needs NumPy and CuPy, and no network.

Level 1 is a client's and a model's process; level 2 is a real server, which needs tritonclient as well. The exit status
is 0 if all that was checked held, 1 if something failed, and 2 if there is no GPU or no CuPy.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_check_fake import load_fake_gpu
from gpu_check_gpu import Gpu, LoadGpu, load_gpu
from gpu_check_machine import describe, gpu_name
from gpu_check_measuring import FULL, SMALL, Amounts
from gpu_check_processes import check_processes
from gpu_check_report import Report
from gpu_check_server import check_server

from shm_backend_utils.errors import MachineError

__all__ = ["check", "default_folder", "main"]

RESULTS: Final = Path(__file__).resolve().parents[2] / "docs" / "gpu"
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


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        epilog="scripts/gpu_check --python PYTHON ... runs it with another Python than python3.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the report goes (default: docs/gpu/<date>-<GPU>)"
    )
    parser.add_argument("--level", type=int, choices=LEVELS, help="run one level (default: both)")
    parser.add_argument(
        "--server", type=Path, metavar="DIR", help="where a server is installed (default: where this package does that)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="do little, on a fake GPU: to see whether this program works; needs --out",
    )
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.out is None:
        parser.error("--rehearse needs --out: its report is none of a GPU")
    load, amounts = (load_fake_gpu, SMALL) if arguments.rehearse else (load_gpu, FULL)
    levels = LEVELS if arguments.level is None else (arguments.level,)
    return check(load, amounts, arguments.out, levels, arguments.server)


if __name__ == "__main__":
    sys.exit(main())
