"""Which tests execute a line: found out once, and again by those that a change, taken apart, may concern."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from .. import ROOT
from . import recording
from .checks import Mutant

__all__ = ["Covering", "NotRunError", "Piece", "pytest_options"]

REST: Final = ""
"""The name of what is in no function."""

_PARTS: Final = ("unit", "property", "conformance", "harness")
_TIMER: Final = "setitimer"
"""What tests call whose signals raise: inside coverage's own code, that would leave its lock taken for ever."""
_RUN: Final = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}


@dataclass(frozen=True, slots=True)
class Piece:
    """A function, with those inside it, or the rest of a module."""

    first_line: int  # where it is
    last_line: int
    digest: str  # of a function's text, wherever it is; of the rest as it is parsed, with the functions' signatures


def pieces_of(source: str) -> dict[str, Piece]:
    """Return a module's pieces by name: ``__qualname__``, the second of a name with a plus, or :data:`REST`."""
    tree = ast.parse(source)
    lines = source.splitlines()
    found: dict[str, Piece] = {}
    _take_functions(tree, "", lines, found)
    found[REST] = Piece(1, len(lines), _digest(ast.dump(tree)))
    return found


def _take_functions(scope: ast.Module | ast.ClassDef, prefix: str, lines: list[str], found: dict[str, Piece]) -> None:
    """Note the functions of a module or class, and leave of them their signatures."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            _take_functions(node, f"{prefix}{node.name}.", lines, found)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last_line = node.lineno if node.end_lineno is None else node.end_lineno
            name = f"{prefix}{node.name}"
            while name in found:  # a property's setter, for example
                name += "+"
            found[name] = Piece(first_line, last_line, _digest("\n".join(lines[first_line - 1 : last_line])))
            node.body = []
    scope.body = [node for node in scope.body if not _is_text(node)]


def _is_text(node: ast.stmt) -> bool:
    """Return whether it is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class NotRunError(Exception):
    """The tests do not run, or do not pass where they passed before; the message is pytest's."""


def pytest_options(folder: Path) -> list[str]:
    """Return how the tests are run: short, by themselves, and without a trace in the checkout."""
    return ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tables=100", f"--basetemp={folder / 'pytest'}"]


@dataclass(frozen=True, slots=True)
class Covering:
    """What each test executes."""

    seconds: dict[str, float]  # how long each test takes
    failed: list[str]  # tests, and files of tests, that fail without a mutant. They prove nothing, and are left out
    _lines: dict[str, dict[str, frozenset[int]]]  # by file, then by test

    @classmethod
    def of_checkout(cls, root: Path, kept: Path, folder: Path) -> Covering:
        """Run the tests that need no server, but for files whose last run is kept and still holds.

        It holds while a file, the helpers in its folders, and every function that its tests have executed are as they
        were, with what else is in those functions' modules. Where they are in their modules does not matter.

        Raises NotRunError: the tests cannot be run at all.
        """
        known = json.loads(kept.read_text()) if kept.exists() else {}
        digests = _digests(root)
        pieces = {
            str(path.relative_to(root)): pieces_of(path.read_text())
            for path in sorted((root / "shm_backend_utils").rglob("*.py"))
        }
        files = {file: found for file, found in known.items() if _holds(found, digests.get(file), pieces)}
        missing = [file for file in digests if file not in files]
        failed: list[str] = []
        if missing:
            found = _record(root, missing, folder)
            failed = found["failed"]
            files |= {file: {"digest": digests[file], "executed": {}, "tests": {}} for file in missing}
            for test, facts in found["tests"].items():
                _add(files[test.partition("::")[0]], test, facts, pieces)
            kept.parent.mkdir(parents=True, exist_ok=True)
            to_repeat = {name.partition("::")[0] for name in failed}
            kept.write_text(json.dumps({file: files[file] for file in files.keys() - to_repeat}))
        return cls._of((facts for file in files.values() for facts in file["tests"].items()), failed, pieces)

    @classmethod
    def _of(
        cls, tests: Iterable[tuple[str, dict[str, Any]]], failed: list[str], pieces: dict[str, dict[str, Piece]]
    ) -> Covering:
        seconds: dict[str, float] = {}
        lines: dict[str, dict[str, frozenset[int]]] = {}
        for test, facts in tests:
            seconds[test] = facts["seconds"]
            for file, functions in facts["lines"].items():
                lines.setdefault(file, {})[test] = frozenset(
                    pieces[file][function].first_line + line for function, found in functions.items() for line in found
                )
        return cls(seconds, failed, lines)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that may execute what a mutant changes: first those that are known to, the fastest first."""
        executed = self._lines.get(mutant.file, {})
        changed, all_lines = (range(begin, mutant.last_line + 1) for begin in (mutant.first_line, mutant.from_line))
        tests = [test for test, lines in executed.items() if not lines.isdisjoint(all_lines)]
        return sorted(tests, key=lambda test: (executed[test].isdisjoint(changed), self.seconds[test]))


def _holds(file: dict[str, Any], digest: str | None, pieces: dict[str, dict[str, Piece]]) -> bool:
    """Return whether a file of tests, and what it has executed, are as they were when it was run."""
    return file["digest"] == digest and all(
        name in pieces.get(module, {}) and pieces[module][name].digest == found
        for module, functions in file["executed"].items()
        for name, found in functions.items()
    )


def _add(file: dict[str, Any], test: str, facts: dict[str, Any], pieces: dict[str, dict[str, Piece]]) -> None:
    """Add what a test has executed, each line counted from where its function begins."""
    lines: dict[str, dict[str, list[int]]] = {}
    for module, numbers in facts["lines"].items():
        executed = file["executed"].setdefault(module, {REST: pieces[module][REST].digest})
        for name, piece in pieces[module].items():
            inside = [number - piece.first_line for number in numbers if piece.first_line <= number <= piece.last_line]
            if inside and name != REST:
                lines.setdefault(module, {})[name] = inside
                executed[name] = piece.digest
    file["tests"][test] = {"seconds": facts["seconds"], "lines": lines}


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
    if done.returncode not in _RUN:
        raise NotRunError(f"the tests cannot be run:\n{done.stdout[-4_000:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _digests(root: Path) -> dict[str, str]:
    """Return for each file of tests what it is, with the helpers in its folders."""
    tests = root / "tests"
    found = {}
    for part in _PARTS:
        for path in sorted((tests / part).rglob("test_*.py")):
            if _TIMER in path.read_text():
                continue
            above = [folder for folder in reversed(path.parents) if folder == tests or tests in folder.parents]
            digest = hashlib.sha256()
            for file in [*(helper for folder in above for helper in _helpers_in(folder)), path]:
                digest.update(file.read_bytes())
            found[str(path.relative_to(root))] = digest.hexdigest()
    return found


def _helpers_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("test_"))
