"""Check and measure this library on a real GPU. Needs NumPy and cuda-bindings, and no network.

Level 1 is a client's and a model's process; level 2 is a real server, which needs tritonclient as well. Kernels are
CuPy's, PyTorch's, or, with neither, the driver's own copies.

What is asked for by name and cannot be run here has failed. The exit status is 0 if all held, 1 if something failed,
and 2 if there is no GPU or no cuda-bindings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .check import LEVELS, Wanted, check
from .fakes.gpu import load_fake_gpu
from .gpu import load_gpu
from .kernels import LIBRARIES
from .report import FULL, SMALL


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
        "--with",
        dest="libraries",
        action="append",
        choices=LIBRARIES,
        default=[],
        help="the array library, which must be there; may be given again (default: each that is there, and neither)",
    )
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
    return check(load, amounts, arguments.out, Wanted(levels, arguments.libraries, arguments.server))


if __name__ == "__main__":
    sys.exit(main())
