"""Take checks out of the library, one at a time, and see whether a test that needs no server notices.

A mutant is the library with a raise dropped, a guard left out, a part of a condition dropped, a comparison that is off
by one or the other way round, or a lease not taken. The exit status is 1 if one survives that is not known to be
equivalent.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.terminal import exit_status, positive
from shm_backend_utils.testing.faults.at_hand import take_private_shm

from .. import ROOT
from .checks import UNCHANGED, Mutant, find
from .covering import Covering, NotRunError
from .trial import Verdict, try_mutant

SHM_BYTES: Final = 512 << 20
SLOWER: Final = 3  # than when the tests were recorded: the machine may be busy
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
"""Mutants that nothing can tell from the library, each with its reason."""


def mutants_of(only: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the files, or of those that a pattern names."""
    files = sorted(str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern))
    wanted = [file for file in files if not only or any(fnmatch(file, f"*{pattern}") for pattern in only)]
    return [mutant for file in wanted for mutant in find(file, (ROOT / file).read_text())]


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    known, again = named_in(EQUIVALENT), None if arguments.again is None else named_in(arguments.again)
    mutants = [mutant for mutant in mutants_of(arguments.only) if mutant.name not in known]
    if again is not None:
        mutants = [mutant for mutant in mutants if mutant.name in again]  # wherever it is in its function now
    if not mutants:
        raise NotRunError("no file has a mutant of those: --only takes patterns of files, --again a report")
    sample = len(mutants) if arguments.sample is None else arguments.sample
    return random.Random(arguments.seed).sample(mutants, sample) if sample < len(mutants) else mutants


def named_in(report: Path) -> set[tuple[str, str, str]]:
    return {(each["file"], each["function"], each["change"]) for each in json.loads(report.read_text())}


def run(mutants: Sequence[Mutant], limit_s: float, report: Path | None) -> int:
    if not take_private_shm(SHM_BYTES):
        print("/dev/shm is shared with others, whose files may confuse tests: it takes root", file=sys.stderr)
    found: list[tuple[Mutant, Verdict]] = []
    with tempfile.TemporaryDirectory(prefix="shm-backend-utils-mutants-") as name:
        folder = Path(name)
        covering = Covering.of_checkout(ROOT, KEPT, folder)
        for test in covering.failed:
            print(f"{test} fails as it is, and is left out", file=sys.stderr)
        check_trials(mutants, covering, limit_s, folder)
        for number, mutant in enumerate(mutants, 1):
            tests = covering.tests_of(mutant)
            expected_s = sum(covering.seconds[test] for test in tests)
            verdict = try_mutant(mutant, tests, limit_s + SLOWER * expected_s, folder)
            found.append((mutant, verdict))
            if verdict in (Verdict.SURVIVED, Verdict.NOT_EXECUTED):
                where = f"{mutant.file}:{mutant.first_line}  {mutant.function}"
                print(f"{verdict.value:>12}  {where}  {mutant.change}", flush=True)
            if sys.stderr.isatty():
                print(f"{number} of {len(mutants)}", end="\r", file=sys.stderr, flush=True)
    alive = [mutant for mutant, verdict in found if verdict in (Verdict.SURVIVED, Verdict.NOT_EXECUTED)]
    print(f"{len(found) - len(alive)} of {len(found)} mutants were killed")
    if report is not None:
        content = [{**asdict(mutant), "verdict": verdict.value} for mutant, verdict in found]
        report.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if alive else 0


def check_trials(mutants: Sequence[Mutant], covering: Covering, limit_s: float, folder: Path) -> None:
    """Raise NotRunError unless the library survives a trial as it is: then what is killed is killed by its change."""
    for mutant in mutants:
        tests = covering.tests_of(mutant)[:10]
        if tests:
            verdict = try_mutant(replace(mutant, number=UNCHANGED), tests, limit_s, folder)
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
    parser.add_argument(
        "--limit",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="a mutant that takes so much longer than the library hangs; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each mutant to FILE")
    arguments = parser.parse_args()
    return exit_status(lambda: run(chosen(arguments), arguments.limit, arguments.json), NotRunError)


if __name__ == "__main__":
    sys.exit(main())
