"""Which tests execute a line: found out once, and again for what has changed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import ROOT
from . import recording
from .checks import Mutant

__all__ = ["Covering", "NotRunError", "pytest_options"]

_PARTS: Final = ("unit", "property", "conformance")


class NotRunError(Exception):
    """The tests do not run, or do not pass as they are; the message is pytest's."""


def pytest_options(folder: Path) -> list[str]:
    """Return how the tests are run: short, by themselves, and without a trace in the checkout."""
    return ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tables=100", f"--basetemp={folder / 'pytest'}"]


@dataclass(frozen=True, slots=True)
class Covering:
    """What each test executes.

    Attributes
    ----------
    seconds : dict of str to float
        How long each test takes.
    """

    seconds: dict[str, float]
    _lines: dict[str, dict[str, frozenset[int]]]  # by file, then by test

    @classmethod
    def of_checkout(cls, kept: Path, folder: Path) -> Covering:
        """Run the tests that need no server, but for files whose last run is kept and still holds.

        Parameters
        ----------
        kept : Path
            A file of what was found the last time. It is written anew.
        folder : Path
            For what tests leave.

        Raises
        ------
        NotRunError
            A test fails.
        """
        known = json.loads(kept.read_text()) if kept.exists() else {}
        digests = _digests()
        files = {file: known[file] for file, digest in digests.items() if known.get(file, {}).get("digest") == digest}
        missing = [file for file in digests if file not in files]
        if missing:
            for file in missing:
                files[file] = {"digest": digests[file], "tests": {}}
            for test, facts in _record(missing, folder).items():
                files[test.partition("::")[0]]["tests"][test] = facts
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(files))
        return cls._of(facts for file in files.values() for facts in file["tests"].items())

    @classmethod
    def _of(cls, tests: Iterable[tuple[str, dict[str, Any]]]) -> Covering:
        seconds: dict[str, float] = {}
        lines: dict[str, dict[str, frozenset[int]]] = {}
        for test, facts in tests:
            seconds[test] = facts["seconds"]
            for file, found in facts["lines"].items():
                lines.setdefault(file, {})[test] = frozenset(found)
        return cls(seconds, lines)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute what a mutant changes, the fastest first."""
        changed = range(mutant.first_line, mutant.last_line + 1)
        tests = [
            test for test, lines in self._lines.get(mutant.file, {}).items() if any(line in lines for line in changed)
        ]
        return sorted(tests, key=self.seconds.__getitem__)


def _record(files: list[str], folder: Path) -> dict[str, Any]:
    output = folder / "covering.json"
    environment = {
        **os.environ,
        recording.OUTPUT: str(output),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "examples"),
    }
    command = [sys.executable, "-m", "pytest", "-p", recording.__name__, *pytest_options(folder), *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise NotRunError(f"the tests do not pass as they are:\n{done.stdout[-4_000:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _digests() -> dict[str, str]:
    """Return for each file of tests what its run depends on: the library, the helpers in its folders, and itself."""
    tests = ROOT / "tests"
    library = sorted((ROOT / "shm_backend_utils").rglob("*.py"))
    known = _added(hashlib.sha256(), library)
    found = {}
    for part in _PARTS:
        for path in sorted((tests / part).rglob("test_*.py")):
            above = [folder for folder in reversed(path.parents) if folder == tests or tests in folder.parents]
            shared = [helper for folder in above for helper in _helpers_in(folder)]
            found[str(path.relative_to(ROOT))] = _added(known.copy(), [*shared, path]).hexdigest()
    return found


def _helpers_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("test_"))


def _added(digest: Any, paths: Iterable[Path]) -> Any:
    for path in paths:
        digest.update(path.read_bytes())
    return digest
