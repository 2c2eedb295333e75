"""The command ``shm-backend-utils``."""

from __future__ import annotations

import argparse
from typing import Final

from .. import __version__
from . import regions

__all__ = ["main"]

_DISTRIBUTION: Final = "triton-shm-backend-utils"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="shm-backend-utils", description=__doc__)
    parser.add_argument("--version", action="version", version=f"{_DISTRIBUTION} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    regions.add_command(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status
