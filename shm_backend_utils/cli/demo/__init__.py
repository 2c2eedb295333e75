"""Send photographs through a model on all paths; compare the results to the byte, measure, draw."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..terminal import positive

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--url", metavar="HOST:PORT", help="gRPC address of a running server; starts one if not given")
    parser.add_argument("--rounds", type=positive, metavar="N", default=50, help="default: %(default)s")
    parser.add_argument("--picture", type=Path, metavar="FILE", default=Path("demo.png"), help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return its exit status."""
    from .show import show  # noqa: PLC0415  # --help needs none of the packages that it imports

    return show(arguments.url, arguments.rounds, arguments.picture)
