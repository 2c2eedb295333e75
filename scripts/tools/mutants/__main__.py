"""Take checks out of the library, one at a time, and see whether a test that needs no server notices.

The exit status is 1 if a mutant survives that is not known to be equivalent.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import hypothesis  # noqa: F401  # what every test needs is imported once, before the processes are forked
import numpy as np  # noqa: F401
import pytest

from shm_backend_utils.cli.terminal import exit_status, positive
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.testing.faults.at_hand import take_private_shm

from .. import ROOT
from .checks import UNCHANGED, Mutant, find, mutate
from .covering import Covering, NotRunError, pytest_options

LIMIT_S: Final = 30.0
"""A mutant that takes so much longer than the library hangs."""


class Verdict(Enum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_EXECUTED = "not executed"


def try_mutant(mutant: Mutant, tests: list[str], limit_s: float, folder: Path) -> Verdict:
    if not tests:
        return Verdict.NOT_EXECUTED
    before = set(DEV_SHM.iterdir())
    pid = os.fork()
    if pid == 0:
        _run(mutant, tests, folder)
    watch = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([watch], [], [], limit_s)
    finally:
        os.close(watch)
        _kill_all_of(pid)
        _, status = os.waitpid(pid, 0)
        for path in set(DEV_SHM.iterdir()) - before:  # /dev/shm is this tool's own
            _remove(path)
    if not ended:
        return Verdict.TIMED_OUT
    return Verdict.SURVIVED if status == 0 else Verdict.KILLED


def _kill_all_of(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or not made its group yet
            time.sleep(0.001)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
        else:
            return


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(mutant: Mutant, tests: list[str], folder: Path) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with (folder / "output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "examples")
        os.chdir(ROOT)
        _import_changed(mutant)
        options = ["-x", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--timeout=20"]
        status = pytest.main([*pytest_options(folder), *options, *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import_changed(mutant: Mutant) -> None:
    """Let Python import a changed module in place of the real one, which may be cached or imported already."""
    path = ROOT / mutant.file
    code = compile(mutate(mutant, path.read_text()), str(path), "exec")
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def changed(self: importlib.machinery.SourceFileLoader, fullname: str) -> types.CodeType | None:
        return code if Path(self.path) == path else get_code(self, fullname)

    setattr(loader, "get_code", changed)  # noqa: B010  # mypy takes no assignment to a method
    for name in [name for name in sys.modules if name.partition(".")[0] == "shm_backend_utils"]:
        del sys.modules[name]  # this tool uses some itself


FILES: Final = (
    "shm_backend_utils/http/*.py",
    "shm_backend_utils/protocol/*.py",
    "shm_backend_utils/memory/*.py",
    "shm_backend_utils/memory/pool/*.py",
    "shm_backend_utils/client/calls.py",
    "shm_backend_utils/client/core.py",
    "shm_backend_utils/client/paths/*.py",
    *(f"shm_backend_utils/model/{part}/*.py" for part in ("call", "mapping", "modes", "forward")),
)
KEPT: Final = ROOT / ".mutants" / "tests.json"
EQUIVALENT: Final = Path(__file__).with_name("equivalent.json")
"""Mutants that behave exactly as the library, each with its reason."""


def mutants_of(only: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the files, or of those that a pattern names."""
    files = sorted(str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern))
    wanted = [file for file in files if not only or any(fnmatch(file, f"*{pattern}") for pattern in only)]
    return [mutant for file in wanted for mutant in find(file, (ROOT / file).read_text())]


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    known = named_in(EQUIVALENT)
    mutants = [mutant for mutant in mutants_of(arguments.only) if mutant.name not in known]
    if arguments.again is not None:
        again = named_in(arguments.again)
        mutants = [mutant for mutant in mutants if mutant.name in again]  # wherever it is in its function now
    if not mutants:
        raise NotRunError("no file has a mutant of those: --only takes patterns of files, --again a report")
    sample = len(mutants) if arguments.sample is None else arguments.sample
    return random.Random(arguments.seed).sample(mutants, sample) if sample < len(mutants) else mutants


def named_in(report: Path) -> set[tuple[str, str, str]]:
    return {(each["file"], each["function"], each["change"]) for each in json.loads(report.read_text())}


def run(mutants: Sequence[Mutant], report: Path | None) -> int:
    if not take_private_shm(512 << 20):
        print("/dev/shm is shared with others, whose files may confuse tests: it takes root", file=sys.stderr)
    found: list[tuple[Mutant, Verdict]] = []
    folder = Path(tempfile.mkdtemp(prefix="shm-backend-utils-mutants-"))  # no finalizer, which a test's fork may run
    try:
        covering = Covering.of_checkout(ROOT, KEPT, folder)
        for test in covering.failed:
            print(f"{test} fails as it is, and is left out", file=sys.stderr)
        check_trials(mutants, covering, folder)
        for number, mutant in enumerate(mutants, 1):
            tests = covering.tests_of(mutant)
            slower_s = 3 * sum(covering.seconds[test] for test in tests)  # the machine may be busy
            verdict = try_mutant(mutant, tests, LIMIT_S + slower_s, folder)
            found.append((mutant, verdict))
            if verdict in (Verdict.SURVIVED, Verdict.NOT_EXECUTED):
                where = f"{mutant.file}:{mutant.first_line}  {mutant.function}"
                print(f"{verdict.value:>12}  {where}  {mutant.change}", flush=True)
            if sys.stderr.isatty():
                print(f"{number} of {len(mutants)}", end="\r", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    alive = [mutant for mutant, verdict in found if verdict in (Verdict.SURVIVED, Verdict.NOT_EXECUTED)]
    print(f"{len(found) - len(alive)} of {len(found)} mutants were killed")
    if report is not None:
        content = [{**asdict(mutant), "verdict": verdict.value} for mutant, verdict in found]
        report.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if alive else 0


def check_trials(mutants: Sequence[Mutant], covering: Covering, folder: Path) -> None:
    """Raise NotRunError unless the library survives a trial as it is: then what is killed is killed by its change."""
    for mutant in mutants:
        tests = covering.tests_of(mutant)[:10]
        if tests:
            verdict = try_mutant(replace(mutant, number=UNCHANGED), tests, LIMIT_S, folder)
            if verdict is not Verdict.SURVIVED:
                output = (folder / "output").read_text(errors="replace")
                raise NotRunError(f"tests fail that did not fail when they were recorded:\n{output[-4_000:]}")
            return


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="files; as often as you like")
    parser.add_argument("--sample", type=positive, metavar="N", help="try N of them, drawn by chance")
    parser.add_argument("--again", type=Path, metavar="FILE", help="try those that an earlier --json FILE names")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of that chance; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each mutant to FILE")
    arguments = parser.parse_args()
    return exit_status(lambda: run(chosen(arguments), arguments.json), NotRunError)


if __name__ == "__main__":
    sys.exit(main())
