"""Run the tests with NumPy 2, and those that NumPy can make a difference to with NumPy 1.26, in three processes.

Whatever pytest takes may follow: then pytest runs once, with that, on NumPy 2. CONTRIBUTING.md names other servers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.terminal import Interrupted, exit_status
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.reaper import reap
from shm_backend_utils.server.install import FOLDER_VARIABLE
from shm_backend_utils.server.installation import PYTHON, Installation
from shm_backend_utils.server.wheels import VERSION_VARIABLE, appear_whole, cache_folder

from . import ROOT
from .processes import started

VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER_NEWEST"
_BESIDE: Final = ROOT.parent / "shared" / "servers"
_ARCHIVE: Final = ".tar.xz"
_STUB: Final = "triton_python_backend_stub"

_MOST_FLAKES: Final = 2


def find_newest(python: str | None) -> Path | None:
    """Return the folder of the newest server for a version of Python, unpacked if need be; None if there is none."""
    named = os.environ.get(VARIABLE)
    if named and not Path(named).exists():
        raise MachineError(f"{VARIABLE} names {named}, which is not there")
    beside_us = [each for each in _BESIDE.glob("*") if each.name.endswith(_ARCHIVE) or Installation(each).is_complete]
    found = [Path(named).absolute()] if named else beside_us
    newest = max(found, key=lambda each: [int(number) for number in re.findall(r"\d+", each.name)], default=None)
    return _unpacked(newest, python or PYTHON) if newest is not None and newest.is_file() else newest


def _unpacked(archive: Path, python: str) -> Path:
    """Unpack a server to the cache, once for each Python, with the stub for it that it may have in ``stubs``."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    server = Installation(cache_folder() / f"{archive.name.removesuffix(_ARCHIVE)}-{digest}-py{python}")

    def fill(scratch: Path, fresh: Path) -> None:
        done = subprocess.run(["tar", "-xf", archive, "-C", scratch], capture_output=True, text=True, check=False)
        binary = next(scratch.glob("**/bin/tritonserver"), None)
        if done.returncode or binary is None:
            raise MachineError(f"{archive} holds no server: {done.stderr.strip() or 'it has no bin/tritonserver'}")
        folder = binary.parents[1]
        stub = folder / "stubs" / python / _STUB
        if stub.is_file():
            shutil.copy(stub, folder / "backends" / "python" / _STUB)
        folder.rename(fresh)

    if not server.is_complete:
        appear_whole(server.folder, lambda: server.is_complete, fill)
    return server.folder


@dataclass(frozen=True)
class Environment:
    name: str  # of its folder
    server: Path | None = None  # the folder of the server that tests run on; that of the variables if not given

    @property
    def command(self) -> list[str]:
        """The beginning of a command line that runs pytest there."""
        return [str(ROOT / self.name / "bin" / "python"), "-m", "pytest", "-o", f"cache_dir={self._cache}"]

    def failed(self) -> set[str]:
        found = ROOT / self._cache / "v" / "cache" / "lastfailed"
        return set(json.loads(found.read_text())) if found.exists() else set()

    @property
    def variables(self) -> dict[str, str]:
        return dict(os.environ) if self.server is None else os.environ | {FOLDER_VARIABLE: str(self.server)}

    @property
    def label(self) -> str:
        """The folder's name, and that of a server's folder."""
        return self.name if self.server is None else f"{self.name}, {self.server.name}"

    @property
    def _cache(self) -> str:
        return f".pytest_cache/{self.label}"


@dataclass
class Tally:
    status: int = 0
    flakes: list[str] = field(default_factory=list)

    def run(self, environment: Environment, arguments: Sequence[str]) -> None:
        """Run tests; run those that failed once more, alone, if they are few."""
        workers = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=20")
        status = _run(environment, ["--cache-clear", *workers, *arguments])
        failed = environment.failed()
        if status == 1 and 0 < len(failed) <= 20:  # pytest's status of failed tests; if more fail, it is no flake
            again = [each for each in arguments if each.startswith("-")]
            status = _run(environment, [*again, *sorted(failed)])
            self.flakes += [f"{environment.label}: {test}" for test in sorted(failed - environment.failed())]
        self.status = self.status or status  # which is negative where a signal has ended pytest

    def finish(self) -> int:
        """Name the flakes, and return the exit status."""
        if not self.flakes:
            return self.status
        print(f"=== {len(self.flakes)} flaky: failed, then passed; more than {_MOST_FLAKES} fail the run ===")
        print(*self.flakes, sep="\n")
        return self.status or int(len(self.flakes) > _MOST_FLAKES)


def passed_to_pytest(environment: Environment, arguments: list[str]) -> int:
    """Run pytest with a user's own arguments; return its status."""
    process = subprocess.Popen([*environment.command, *arguments], cwd=ROOT, env=environment.variables)
    try:
        return process.wait()
    except Interrupted as interrupted:
        if interrupted.number == signal.SIGINT:  # which the terminal has sent to pytest, too
            return process.wait()
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _run(environment: Environment, arguments: Sequence[str]) -> int:
    with started([*environment.command, *arguments], cwd=ROOT, env=environment.variables) as process:
        return process.wait()


SUITE: Final = ("conformance", "crash", "e2e", "harness", "property", "scripts", "server", "unit")
"""Folders under ``tests``. The others run with ``--all``."""
OF_SERVERS: Final = ("conformance", "crash", "e2e", "server")
"""Those that are about a server."""
WITH_NUMPY_1: Final = ROOT / "tests" / "with_numpy1"
"""Lists the tests that NumPy 1.26 can make a difference to, as patterns of paths."""
ON_NEWEST: Final = ROOT / "tests" / "on_newest"
"""Lists the tests that ``--newest`` runs, in the same way."""
ALL_ON_NEWEST: Final = ("tests/conformance", "tests/crash", "tests/e2e")
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


def check_room() -> None:
    """Raise MachineError if there is less shared memory than the tests need."""
    free = shutil.disk_usage(SHM).free if SHM.exists() else 0
    if free < NEEDED_SHM_BYTES:
        raise MachineError(f"{SHM} has {free >> 20} MiB free, and the tests need {NEEDED_SHM_BYTES >> 20}: make room")


def set_up(python: str | None, *, numpy1: bool) -> Environment:
    """Make an environment, unless it is there; end with the status of the setup, which says why, if it fails."""
    options = [*(["--python", python] if python else []), *(["--numpy1"] if numpy1 else [])]
    with started([str(ROOT / "scripts" / "setup"), *options]) as setup:
        if setup.wait():
            sys.exit(setup.returncode)
    return Environment(f".venv{f'-py{python}' if python else ''}{'-numpy1' if numpy1 else ''}")


def on_newest(environment: Environment, python: str | None) -> Environment | None:
    """Return an environment with the newest server, and print which one it is; None if there is none."""
    folder = find_newest(python)
    if folder is None:
        where = f"{VARIABLE} names none, and {_BESIDE} has none: a server's folder, or {_ARCHIVE} of one"
        print(f"=== not run on a newer Triton: {where} ===", flush=True)
        return None
    print(f"=== on Triton {Installation(folder).triton}, in {folder} ===", flush=True)
    return replace(environment, server=folder)


def listed(file: Path) -> list[str]:
    """Return the files and folders that a list of patterns names."""
    return [str(path.relative_to(ROOT)) for pattern in file.read_text().split() for path in sorted(ROOT.glob(pattern))]


def run(chosen: argparse.Namespace, for_pytest: list[str]) -> int:
    """Run what was chosen, each part with its Python, NumPy and server; return the exit status."""
    check_room()
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
    # All environments first: if one cannot be made, you learn of it before minutes of tests.
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
                runs.append((set_up("3.10", numpy1=False), [*ON_OLDEST_PYTHON]))
                if (newest := on_newest(environment, None)) is not None:
                    runs.append((newest, [*amount, "--grpcio", *ALL_ON_NEWEST]))  # else our own sockets do
    tally = Tally()
    for each, arguments in runs:
        tally.run(each, arguments)
    reap()  # memory of clients that tests have killed
    return tally.finish()


def main() -> int:
    chosen, for_pytest = parsed()
    return exit_status(lambda: run(chosen, for_pytest), MachineError)


if __name__ == "__main__":
    sys.exit(main())
