"""``scripts/mutants`` tries a mutant, whatever module it is of."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools import ROOT
from scripts.tools.mutants import __main__ as mutants
from scripts.tools.mutants.checks import UNCHANGED, find

pytestmark = pytest.mark.long

LONG_S = 100.0
SHARED_FILE = "shm_backend_utils/memory/shared_file.py"
NO_ROOM = """
import tempfile

import pytest
from shm_backend_utils.memory.shared_file import allocate

def test_takes_no_more_than_there_is_room_for():
    with tempfile.TemporaryFile() as file, pytest.raises(OSError):
        allocate(file.fileno(), 0, 4096, room=0)
"""


@pytest.mark.parametrize(("number", "verdict"), [(UNCHANGED, mutants.Verdict.SURVIVED), (None, mutants.Verdict.KILLED)])
def test_a_module_that_the_tester_uses_itself_is_changed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, verdict: mutants.Verdict
) -> None:
    monkeypatch.setattr(mutants, "DEV_SHM", tmp_path)
    (tmp_path / "conftest.py").write_text('def pytest_addoption(parser):\n    parser.addoption("--tables")\n')
    test = tmp_path / "test_room.py"
    test.write_text(NO_ROOM)
    found = find(SHARED_FILE, (ROOT / SHARED_FILE).read_text())
    (mutant,) = [each for each in found if each.function == "allocate" and "without `raise OSError" in each.change]
    mutant = mutant if number is None else replace(mutant, number=number)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # of the process that runs it
    assert mutants.try_mutant(mutant, [str(test)], LONG_S, folder) is verdict
