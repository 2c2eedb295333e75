"""Finds which tests execute a line; after a change, only tests that it may concern run again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .. import ROOT
from . import recording
from .checks import Mutant


class NotRunError(Exception):
    """The tests do not run, or do not pass where they passed before; the message is pytest's."""


def pytest_options(folder: Path) -> list[str]:
    """Return how the tests are run: short, by themselves, and without a trace in the checkout."""
    return ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tables=100", f"--basetemp={folder / 'pytest'}"]


@dataclass(frozen=True, slots=True)
class Covering:
    seconds: dict[str, float]  # how long each test takes
    failed: list[str]  # tests, and files of tests, that fail without a mutant. They prove nothing, and are left out
    _lines: dict[str, dict[str, frozenset[int]]]  # by file, then by test

    @classmethod
    def of_checkout(cls, root: Path, kept: Path, folder: Path) -> Covering:
        """Run the tests that need no server, except files whose kept run still holds: nothing that it ran changed."""
        known = json.loads(kept.read_text()) if kept.exists() else {}
        digests = _digests(root)
        modules = {str(path.relative_to(root)): _digest([path]) for path in (root / "shm_backend_utils").rglob("*.py")}
        files = {
            file: found
            for file, found in known.items()
            if found["digest"] == digests.get(file) and found["modules"].items() <= modules.items()
        }
        missing = [file for file in digests if file not in files]
        failed: list[str] = []
        if missing:
            found = _record(root, missing, folder)
            failed = found["failed"]
            files |= {file: {"digest": digests[file], "modules": {}, "tests": {}} for file in missing}
            for test, facts in found["tests"].items():
                file = files[test.partition("::")[0]]
                file["tests"][test] = facts
                file["modules"] |= {module: modules[module] for module in facts["lines"]}
            kept.parent.mkdir(parents=True, exist_ok=True)
            to_repeat = {name.partition("::")[0] for name in failed}
            kept.write_text(json.dumps({file: files[file] for file in files.keys() - to_repeat}))
        tests = {test: facts for file in files.values() for test, facts in file["tests"].items()}
        lines: dict[str, dict[str, frozenset[int]]] = {}
        for test, facts in tests.items():
            for module, numbers in facts["lines"].items():
                lines.setdefault(module, {})[test] = frozenset(numbers)
        return cls({test: facts["seconds"] for test, facts in tests.items()}, failed, lines)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that may execute what a mutant changes: first those that are known to, the fastest first."""
        executed = self._lines.get(mutant.file, {})
        changed, all_lines = (range(begin, mutant.last_line + 1) for begin in (mutant.first_line, mutant.from_line))
        tests = [test for test, lines in executed.items() if not lines.isdisjoint(all_lines)]
        return sorted(tests, key=lambda test: (executed[test].isdisjoint(changed), self.seconds[test]))


def _record(root: Path, files: list[str], folder: Path) -> dict[str, Any]:
    output = folder / "covering.json"
    environment = {
        **os.environ,
        recording.OUTPUT: str(output),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "examples"),
        "PYTHONPATH": str(ROOT),  # where the plugin is
    }
    plugin = ["-p", recording.__name__, "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *plugin, *pytest_options(folder), *files]
    done = subprocess.run(command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}:
        raise NotRunError(f"the tests cannot be run:\n{done.stdout[-4_000:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _digests(root: Path) -> dict[str, str]:
    """Return for each file of tests what it is, with the helpers in its folders."""
    tests = root / "tests"
    found = {}
    for part in ("unit", "property", "conformance", "harness"):
        for path in sorted((tests / part).rglob("test_*.py")):
            if "setitimer" in path.read_text():  # a signal that raises in coverage's own code leaves its lock taken
                continue
            above = [folder for folder in reversed(path.parents) if folder == tests or tests in folder.parents]
            helpers = [file for each in above for file in sorted(each.glob("*.py")) if not file.match("test_*")]
            found[str(path.relative_to(root))] = _digest([*helpers, path])
    return found


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
