"""Find out what keeps requests from the direct path, and say what to do about it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from ..common.command_line import exit_status
from .checkup import Checkup
from .examination import examine
from .folder_checks import findings_in_folder
from .output import as_json, as_text

__all__ = ["add_arguments", "run"]

_URL: Final = "localhost:8001"
_USAGE: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help=f"HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP (default: {_URL})",
    )
    parser.add_argument("--model", metavar="M", help="examine this model alone (default: all that are ready)")
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="examine a model's folder, or a repository of them, and no server",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Examine, and tell; return 1 if something fatal was found, 2 if what was asked for cannot be.

    A signal ends it only when the memory that it has made is removed.
    """
    return exit_status(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.model_dir is not None:
        if arguments.url is not None or arguments.model is not None:
            print("doctor: --model-dir needs no server; give neither URL nor --model", file=sys.stderr)
            return _USAGE
        subject = str(arguments.model_dir)
        checkup = Checkup()
        checkup.conclude(findings_in_folder(arguments.model_dir), f"nothing is wrong in {subject}")
    else:
        subject = arguments.url or _URL
        checkup = examine(subject, arguments.model)
    print(as_json(checkup, subject) if arguments.json else as_text(checkup), flush=True)
    return checkup.exit_status
