"""Run the tests with NumPy 2, and those that NumPy can make a difference to with NumPy 1.26, in three processes.

Whatever pytest takes may follow: then pytest runs once, with that, on NumPy 2. CONTRIBUTING.md tells of other servers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation
from shm_backend_utils.server.install import FOLDER_VARIABLE
from shm_backend_utils.server.wheels import VERSION_VARIABLE

from .. import ROOT
from .runs import VARIABLE, WHERE, Environment, Tally, find_newest, passed_to_pytest, started

SUITE: Final = ("conformance", "crash", "e2e", "harness", "property", "scripts", "server", "unit")
"""Folders under ``tests``. The others run with ``--all``."""
OF_SERVERS: Final = ("conformance", "crash", "e2e", "server")
"""Those that are about a server."""
WITH_NUMPY_1: Final = ROOT / "tests" / "with_numpy1"
"""Lists the tests that NumPy 1.26 can make a difference to, as patterns of paths."""
ON_NEWEST: Final = ROOT / "tests" / "on_newest"
"""Lists the tests that ``--newest`` runs, in the same way."""
ALL_ON_NEWEST: Final = ("tests/conformance", "tests/crash", "tests/e2e")
OLDEST_PYTHON: Final = "3.10"
ON_OLDEST_PYTHON: Final = ("tests/unit/test_imports.py", "tests/e2e/test_contract.py")
SHM: Final = Path("/dev/shm")
NEEDED_SHM_BYTES: Final = 2 << 30


def parsed() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="scripts/test", description=__doc__, allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="every test there is, also what takes long")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument(
        "--server",
        metavar="VERSION|DIR",
        help="of nvidia-pytriton, as 0.5.0, or the folder of a server: the tests about a server",
    )
    servers.add_argument(
        "--newest", action="store_true", help=f"some tests on the newest server that no wheel carries: {VARIABLE}=DIR"
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
    """Make an environment, unless it is there; CalledProcessError if it cannot be made, and the setup has said why."""
    options = [*(["--python", python] if python else []), *(["--numpy1"] if numpy1 else [])]
    with started([str(ROOT / "scripts" / "setup"), *options]) as setup:
        if setup.wait():
            raise subprocess.CalledProcessError(setup.returncode, "scripts/setup")
    return Environment(f".venv{f'-py{python}' if python else ''}{'-numpy1' if numpy1 else ''}")


def on_newest(environment: Environment, python: str | None) -> Environment | None:
    """Return an environment with the newest server, and print which one it is; None if there is none."""
    folder = find_newest(python)
    if folder is None:
        print(f"=== not run on a newer Triton: {WHERE} ===", flush=True)
        return None
    print(f"=== on Triton {Installation(folder).triton}, in {folder} ===", flush=True)
    return replace(environment, server=folder)


def listed(file: Path) -> list[str]:
    """Return the files and folders that a list of patterns names."""
    patterns = file.read_text().split()
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def run(chosen: argparse.Namespace, for_pytest: list[str]) -> int:
    """Run what was chosen, each part with its Python, NumPy and server; return the exit status."""
    folder = Path(chosen.server).absolute() if chosen.server and Path(chosen.server).is_dir() else None
    if chosen.server and folder is None:
        os.environ[VERSION_VARIABLE] = chosen.server
    if chosen.server or chosen.newest:
        os.environ.pop(FOLDER_VARIABLE, None)  # the folder of some server
    amount = ["--all"] if chosen.all else []
    environment = replace(set_up(chosen.python, numpy1=chosen.numpy1), server=folder)
    newest = on_newest(environment, chosen.python) if chosen.newest else None
    if chosen.newest and newest is None:
        return 0
    if for_pytest:
        return passed_to_pytest(newest or environment, [*amount, *for_pytest])
    # All environments first: you hear of one that cannot be made before minutes of tests.
    runs: list[tuple[Environment, list[str]]]
    if newest is not None:
        runs = [(newest, [*amount, *(ALL_ON_NEWEST if chosen.all else listed(ON_NEWEST))])]
    else:
        folders = OF_SERVERS if chosen.server else SUITE
        paths = ["tests"] if chosen.all and not chosen.server else [f"tests/{folder}" for folder in folders]
        runs = [(environment, [*amount, *paths])]
        if not (chosen.server or chosen.python or chosen.numpy1):
            runs.append((set_up(None, numpy1=True), [*amount, *listed(WITH_NUMPY_1)]))
            if chosen.all:
                runs.append((set_up(OLDEST_PYTHON, numpy1=False), [*ON_OLDEST_PYTHON]))
                if (newest := on_newest(environment, None)) is not None:
                    runs.append((newest, [*amount, "--grpcio", *ALL_ON_NEWEST]))  # else our own sockets do
    tally = Tally()
    for each, arguments in runs:
        tally.run(each, arguments)
    return tally.finish()


def end(number: int, _: object) -> None:
    """End by a signal. A second one, as of a group that gets it too, must not end what ends in good order."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start in the background ignore it
    chosen, for_pytest = parsed()
    if (why := without_room()) is not None:
        print(f"scripts/test: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)  # what was started ends first
    try:
        return run(chosen, for_pytest)
    except MachineError as error:
        print(f"scripts/test: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        print("\nscripts/test: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
