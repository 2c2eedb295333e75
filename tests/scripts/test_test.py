"""``scripts/test`` in a checkout of a few tests: it runs what failed once more, alone, and says so; one combination."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

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
if [ "$1" != -c ]; then
    echo "environment: $(dirname "$(dirname "$0")") server: $SHM_BACKEND_UTILS_SERVER_VERSION"
fi
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

    @property
    def told(self) -> list[str]:
        """What the setup was told, and in which environments and with which servers pytest was run."""
        return [line for line in self.printed.splitlines() if line.startswith(("setup:", "environment:"))]


def run(checkout: Path, *arguments: str, numpy2: tuple[int, int] = (1, 0), numpy1: tuple[int, int] = (1, 0)) -> Run:
    """Run it in a checkout that has so many tests in each environment, which fail so often there."""
    python = PYTHON.format("numpy2", *numpy2, sys.executable)
    for name, text in {
        "scripts/test": (ROOT / "scripts" / "test").read_text(),
        "scripts/setup": '#!/bin/sh\necho "setup: $*"\n',
        ".venv/bin/python": python,
        ".venv-py3.12/bin/python": python,
        ".venv-py3.12-numpy1/bin/python": python,
        ".venv-numpy1/bin/python": PYTHON.format("numpy1", *numpy1, sys.executable),
        "tests/independent_of_numpy": "# Because.\n\ntests/test_words.py  is about words\n",
        "tests/test_words.py": WORDS,
        "tests/test_others.py": OTHERS,
        **{f"tests/{name}/test_{name}.py": WORDS for name in ("conformance", "crash", "e2e", "server")},
    }.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    done = subprocess.run(
        [checkout / "scripts" / "test", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("SHM_BACKEND_UTILS_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Run(done.returncode, done.stdout, checkout)


def test_what_failed_is_run_once_more_and_named_and_fails_if_it_fails_again(tmp_path: Path) -> None:
    done = run(tmp_path, numpy2=(2, 1), numpy1=(3, 2))
    names = [f"{HEADING}", ".venv: tests/test_others.py::test_it[1]"]
    names += [f".venv-numpy1: tests/test_others.py::test_it[{number}]" for number in (1, 2)]
    assert (done.status, done.printed.splitlines()[-4:]) == (1, names), done.printed
    assert (done.runs("numpy2"), done.runs("numpy1")) == (2, 2)
    assert "1 failed, 6 passed" in done.printed
    assert "2 failed, 5 passed" in done.printed  # without the words


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


ONE_COMBINATION = {
    "--server 0.5.0": ([], "environment: .venv server: 0.5.0", "4 passed"),
    "--python 3.12": (["--python 3.12"], "environment: .venv-py3.12 server: ", "6 passed"),
    "--numpy1": (["--numpy1"], "environment: .venv-numpy1 server: ", "6 passed"),
    "--python=3.12 --numpy1 --server=0.5.0": (
        ["--python 3.12", "--numpy1"],
        "environment: .venv-py3.12-numpy1 server: 0.5.0",
        "4 passed",
    ),
    "--server 0.5.0 tests/test_words.py": ([], "environment: .venv server: 0.5.0", "1 passed"),
}


@pytest.mark.parametrize("arguments", ONE_COMBINATION)
def test_one_combination_of_versions_is_set_up_and_tested_once(arguments: str, tmp_path: Path) -> None:
    options, told, passed = ONE_COMBINATION[arguments]
    done = run(tmp_path, *arguments.split())
    assert (done.status, done.told) == (0, [f"setup: {' '.join(options)}", told]), done.printed
    assert passed in done.printed


def test_what_failed_in_one_combination_is_run_once_more(tmp_path: Path) -> None:
    done = run(tmp_path, "--python", "3.12", numpy2=(2, 1))
    assert (done.status, done.printed.splitlines()[-2:]) == (
        0,
        [HEADING, ".venv-py3.12: tests/test_others.py::test_it[1]"],
    ), done.printed


@pytest.mark.parametrize("option", ["--server", "--python"])
def test_an_option_without_a_version_is_refused(option: str, tmp_path: Path) -> None:
    done = run(tmp_path, option)
    assert (done.status, done.printed) == (2, f"scripts/test: {option} needs a version\n")
