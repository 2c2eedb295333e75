"""``scripts/test`` runs what failed once more, alone, and says so; in a checkout of a few tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.tools import ROOT

HEADING = "=== These tests failed once, and were run again alone; the status is that of the second time ==="
# A test of words, which NumPy makes no difference to, and others of which all but the first fail for some time.
WORDS = "def test_words():\n    pass\n"
OTHERS = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(int(os.environ["COUNT"])))
def test_it(number):
    runs = Path(f"{os.environ['ENVIRONMENT']}-runs-{number}")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > int(os.environ["FAILURES"]) or number == 0
"""
PYTHON = """#!/bin/sh
export ENVIRONMENT={} COUNT={} FAILURES={} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_ADDOPTS="-p xdist"
exec {} "$@"
"""


@dataclass(frozen=True)
class Run:
    status: int
    printed: str
    checkout: Path

    def runs(self, environment: str) -> int:
        """How often the second of its tests was run."""
        return len((self.checkout / f"{environment}-runs-1").read_text())


def run(checkout: Path, numpy2: tuple[int, int], numpy1: tuple[int, int]) -> Run:
    """Run it in a checkout that has so many tests in each environment, which fail so often there."""
    for name, text in {
        "scripts/test": (ROOT / "scripts" / "test").read_text(),
        "scripts/setup": "#!/bin/sh\n",
        ".venv/bin/python": PYTHON.format("numpy2", *numpy2, sys.executable),
        ".venv-numpy1/bin/python": PYTHON.format("numpy1", *numpy1, sys.executable),
        "tests/independent_of_numpy": "# Because.\n\ntests/test_words.py  is about words\n",
        "tests/test_words.py": WORDS,
        "tests/test_others.py": OTHERS,
    }.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    done = subprocess.run(
        [checkout / "scripts" / "test"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Run(done.returncode, done.stdout, checkout)


def test_what_failed_is_run_once_more_and_named_and_fails_if_it_fails_again(tmp_path: Path) -> None:
    done = run(tmp_path, numpy2=(2, 1), numpy1=(3, 2))
    names = [f"{HEADING}", ".venv: tests/test_others.py::test_it[1]"]
    names += [f".venv-numpy1: tests/test_others.py::test_it[{number}]" for number in (1, 2)]
    assert (done.status, done.printed.splitlines()[-4:]) == (1, names), done.printed
    assert (done.runs("numpy2"), done.runs("numpy1")) == (2, 2)
    assert "1 failed, 2 passed" in done.printed
    assert "2 failed, 1 passed" in done.printed  # without the words


def test_it_passes_if_all_pass_the_second_time(tmp_path: Path) -> None:
    done = run(tmp_path, numpy2=(2, 1), numpy1=(2, 0))
    assert (done.status, done.printed.splitlines()[-2]) == (0, HEADING), done.printed
    assert (done.runs("numpy2"), done.runs("numpy1")) == (2, 1)


def test_where_many_fail_none_is_run_again(tmp_path: Path) -> None:
    done = run(tmp_path, numpy2=(22, 1), numpy1=(2, 0))
    assert (done.status, HEADING in done.printed) == (1, False), done.printed
    assert (done.runs("numpy2"), done.runs("numpy1")) == (1, 1)


def test_what_is_left_out_with_numpy_1_is_there() -> None:
    lines = (ROOT / "tests" / "independent_of_numpy").read_text().splitlines()
    left_out = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert [path for path in left_out if not (ROOT / path).exists()] == []
    assert left_out
