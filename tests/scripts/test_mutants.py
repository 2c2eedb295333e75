"""What ``scripts/mutants`` knows of tests is kept, or found out again where it must be."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools import ROOT
from scripts.tools.mutants import trial
from scripts.tools.mutants.checks import UNCHANGED, Mutant, find
from scripts.tools.mutants.covering import Covering

pytestmark = pytest.mark.long

LONG_S = 100.0
SHARED_FILE = "shm_backend_utils/memory/shared_file.py"
CHECKS = "scripts/tools/mutants/checks.py"
LIBRARY = "shm_backend_utils/sizes.py"
SOURCE = """
LIMIT = 10


def check(size):
    if size > LIMIT:
        raise ValueError(size)


def double(size):
    return 2 * size
"""
TESTS = """
from pathlib import Path

import pytest
from shm_backend_utils.sizes import check, double

with Path("runs").open("a") as runs:
    runs.write(__name__ + "\\n")
"""
A_FAILURE = """
def test_fails():
    check(11)
"""
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "shm_backend_utils/__init__.py": "",
    "shm_backend_utils/testing/plugin.py": "",  # which pytest loads, as it is installed
    LIBRARY: SOURCE,
    "tests/conftest.py": 'def pytest_addoption(parser):\n    parser.addoption("--tables")\n',
    "tests/unit/test_check.py": f"""{TESTS}
def test_takes_what_is_allowed():
    check(10)

def test_refuses_what_is_larger():
    with pytest.raises(ValueError):
        check(11)
""",
    "tests/unit/test_double.py": f"""{TESTS}
def test_doubles():
    assert double(2) == 4
""",
}
BOTH = ["tests/unit/test_check.py::test_refuses_what_is_larger", "tests/unit/test_check.py::test_takes_what_is_allowed"]


class Checkout:
    """A small library, its tests, and what is known of them."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self._folder = root

    @classmethod
    def make(cls, root: Path) -> Checkout:
        checkout = cls(root)
        for name, text in FILES.items():
            checkout.write(name, text)
        return checkout

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def covering(self) -> Covering:
        return Covering.of_checkout(self.root, self.root / "kept.json", self._folder)

    def runs(self) -> list[str]:
        """Return which files of tests were run since this was asked the last time."""
        runs = self.root / "runs"
        found = sorted(runs.read_text().split()) if runs.exists() else []
        runs.unlink(missing_ok=True)
        return found

    def tests_of_the_comparison(self, covering: Covering) -> list[str]:
        (comparison,) = [
            mutant for mutant in find(LIBRARY, (self.root / LIBRARY).read_text()) if "becomes" in mutant.change
        ]
        return sorted(covering.tests_of(comparison))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout.make(tmp_path_factory.mktemp("recorded"))
    assert checkout.tests_of_the_comparison(checkout.covering()) == BOTH
    assert checkout.runs() == ["test_check", "test_double"]
    return checkout


def test_a_test_that_fails_is_named_and_what_the_others_execute_is_kept(tmp_path: Path) -> None:
    checkout = Checkout.make(tmp_path)
    checkout.write("tests/unit/test_check.py", FILES["tests/unit/test_check.py"] + A_FAILURE)
    checkout.write("tests/unit/test_broken.py", "import nothing_of_that_name")
    covering = checkout.covering()
    assert covering.failed == ["tests/unit/test_broken.py", "tests/unit/test_check.py::test_fails"]
    assert checkout.tests_of_the_comparison(covering) == BOTH
    assert checkout.runs() == ["test_check", "test_double"]

    (checkout.root / "tests/unit/test_broken.py").unlink()
    assert checkout.covering().failed == ["tests/unit/test_check.py::test_fails"]
    assert checkout.runs() == ["test_check"]  # whoever failed is asked again


@pytest.mark.parametrize(
    ("before", "after", "runs"),
    [
        ("LIMIT = 10", "LIMIT = 10", []),
        ("\nLIMIT", '"""Of sizes."""\n\n# In bytes.\n\nLIMIT', []),
        ("2 * size", "size + size", ["test_double"]),
        ("    if size", "    # Too large?\n    if size", ["test_check"]),
        ("LIMIT = 10", "LIMIT = 5 + 5", ["test_check", "test_double"]),
    ],
    ids=["no edit", "comments above", "a function", "another function", "a constant"],
)
def test_edits_run_tests_again(recorded: Checkout, tmp_path: Path, before: str, after: str, runs: list[str]) -> None:
    shutil.copytree(recorded.root, tmp_path / "checkout")
    checkout = Checkout(tmp_path)
    checkout.write(LIBRARY, SOURCE.replace(before, after))
    covering = checkout.covering()
    assert checkout.runs() == runs
    assert checkout.tests_of_the_comparison(covering) == BOTH
    assert covering.failed == []


GENERATORS = """
def patient():
    try:
        yield
    except KeyError:
        pass


def check_later(size):
    yield from patient()
    if size > 10:
        raise ValueError(size)
"""
TESTS_OF_GENERATORS = """
import pytest
from shm_backend_utils.sizes import check_later

def check(size):
    checking = check_later(size)
    next(checking)
    checking.throw(KeyError)

def test_takes_what_is_allowed():
    with pytest.raises(StopIteration):
        check(10)

def test_refuses_what_is_larger():
    with pytest.raises(ValueError):
        check(11)
"""


def test_a_generator_is_executed_to_its_end_whatever_is_thrown_into_those_that_it_waits_for(tmp_path: Path) -> None:
    checkout = Checkout.make(tmp_path)
    (checkout.root / "tests/unit/test_double.py").unlink()
    checkout.write(LIBRARY, GENERATORS)
    checkout.write("tests/unit/test_check.py", TESTS_OF_GENERATORS)
    assert checkout.tests_of_the_comparison(checkout.covering()) == BOTH


NO_ROOM = """
import tempfile

import pytest
from shm_backend_utils.memory.shared_file import allocate

def test_takes_no_more_than_there_is_room_for():
    with tempfile.TemporaryFile() as file, pytest.raises(OSError):
        allocate(file.fileno(), 0, 4096, room=0)
"""


@pytest.mark.parametrize(("number", "verdict"), [(UNCHANGED, trial.Verdict.SURVIVED), (None, trial.Verdict.KILLED)])
def test_a_module_that_the_tester_uses_itself_is_changed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, verdict: trial.Verdict
) -> None:
    monkeypatch.setattr(trial, "DEV_SHM", tmp_path)
    (tmp_path / "conftest.py").write_text(FILES["tests/conftest.py"])
    test = tmp_path / "test_room.py"
    test.write_text(NO_ROOM)
    found = find(SHARED_FILE, (ROOT / SHARED_FILE).read_text())
    (mutant,) = [each for each in found if each.function == "allocate" and "without `raise OSError" in each.change]
    mutant = mutant if number is None else replace(mutant, number=number)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # of the process that runs it
    assert trial.try_mutant(mutant, [str(test)], LONG_S, folder) is verdict


def test_what_tests_leave_in_shared_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = tmp_path / "shm"
    (shm / "of somebody else").mkdir(parents=True)
    monkeypatch.setattr(trial, "DEV_SHM", shm)
    (tmp_path / "conftest.py").write_text(FILES["tests/conftest.py"])
    left = tmp_path / "test_leaves.py"
    left.write_text(
        "from pathlib import Path\n\n"
        "def test_leaves():\n"
        f"    shm = Path({str(shm)!r})\n"
        "    (shm / 'folder').mkdir()\n"
        "    (shm / 'folder' / 'file').touch()\n"
        "    (shm / 'link').symlink_to(shm / 'folder')\n"
    )
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # of the process that runs it
    unchanged = Mutant(CHECKS, UNCHANGED, "", 0, 0, 0, "")
    assert trial.try_mutant(unchanged, [str(left)], LONG_S, tmp_path) is trial.Verdict.SURVIVED
    assert [path.name for path in shm.iterdir()] == ["of somebody else"]
