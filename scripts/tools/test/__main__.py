"""Run the tests with NumPy 2, and those that NumPy can make a difference to with NumPy 1.26, in three processes.

Whatever pytest takes may follow: then pytest runs once, with that, on NumPy 2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from .. import ROOT
from .runs import Environment, Tally, passed_to_pytest

FOLDERS: Final = ("conformance", "crash", "e2e", "harness", "property", "scripts", "server", "unit")
"""Under ``tests``. The others are about documents, deployment, examples, stubs, releases: ``--all`` runs them."""
OF_SERVERS: Final = ("conformance", "crash", "e2e", "server")
"""Which of them start a server."""
WITH_NUMPY_1: Final = ROOT / "tests" / "with_numpy1"
"""Lists the tests that NumPy 1.26 can make a difference to, as patterns of paths."""
OLDEST_PYTHON: Final = "3.10"
ON_OLDEST_PYTHON: Final = ("tests/unit/test_imports.py", "tests/e2e/test_contract.py")
SHM: Final = Path("/dev/shm")
NEEDED_SHM_BYTES: Final = 2 << 30


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """Return our own options, and pytest's."""
    parser = argparse.ArgumentParser(prog="scripts/test", description=__doc__, allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="every test there is, also what takes long")
    parser.add_argument(
        "--server", metavar="VERSION", help="of nvidia-pytriton, as 0.5.0: the tests that start a server"
    )
    parser.add_argument("--python", metavar="VERSION", help="such as 3.12, in an environment of its own")
    parser.add_argument("--numpy1", action="store_true", help="with NumPy 1.26 alone")
    return parser.parse_known_args()


def without_room() -> str | None:
    """Return why the tests cannot run for want of shared memory; None if they can."""
    free = shutil.disk_usage(SHM).free if SHM.exists() else 0
    if free >= NEEDED_SHM_BYTES:
        return None
    return f"{SHM} has {free >> 20} MiB free, and the tests need {NEEDED_SHM_BYTES >> 20}: make room there"


def set_up(python: str | None, *, numpy1: bool) -> Environment:
    """Make an environment, unless it is there.

    Raises
    ------
    subprocess.CalledProcessError
        It cannot be made, and the setup has said why.
    """
    options = [*(["--python", python] if python else []), *(["--numpy1"] if numpy1 else [])]
    subprocess.run([ROOT / "scripts" / "setup", *options], check=True)
    return Environment(f".venv{f'-py{python}' if python else ''}{'-numpy1' if numpy1 else ''}")


def with_numpy1() -> list[str]:
    """Return the files and folders that run with NumPy 1.26, too."""
    patterns = WITH_NUMPY_1.read_text().split()
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def main() -> int:
    """Run the program; return its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start in the background ignore it
    chosen, for_pytest = parsed()
    if (why := without_room()) is not None:
        print(f"scripts/test: {why}", file=sys.stderr)
        return 2
    if chosen.server:
        os.environ["SHM_BACKEND_UTILS_SERVER_VERSION"] = chosen.server
        os.environ.pop("SHM_BACKEND_UTILS_SERVER", None)  # the folder of some server
    amount = ["--all"] if chosen.all else []
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started ends first
    try:
        environment = set_up(chosen.python, numpy1=chosen.numpy1)
        if for_pytest:
            return passed_to_pytest(environment, [*amount, *for_pytest])
        folders = OF_SERVERS if chosen.server else FOLDERS
        paths = ["tests"] if chosen.all and not chosen.server else [f"tests/{folder}" for folder in folders]
        tally = Tally()
        tally.run(environment, [*amount, *paths])
        if not (chosen.server or chosen.python or chosen.numpy1):
            tally.run(set_up(None, numpy1=True), [*amount, *with_numpy1()])
            if chosen.all:
                tally.run(set_up(OLDEST_PYTHON, numpy1=False), ON_OLDEST_PYTHON)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        print("\nscripts/test: interrupted", file=sys.stderr)
        return 130
    return tally.finish()


if __name__ == "__main__":
    sys.exit(main())
