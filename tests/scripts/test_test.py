"""``scripts/test`` in a checkout of a few tests: what runs where, flakes, and how a run ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.tools import ROOT
from scripts.tools.processes import started
from scripts.tools.test import ALL_ON_NEWEST, OF_SERVERS, ON_NEWEST, ON_OLDEST_PYTHON, SUITE, WITH_NUMPY_1

HEADING = re.compile(r"=== (\d+) flaky: .* ===")
PASSES = "def test_it():\n    pass\n"
# All but the first fail for some time.
FAILING = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(int(os.environ["COUNT"])))
def test_it(number):
    runs = Path(f"{os.environ['ENVIRONMENT']}-runs-{number}")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > int(os.environ["FAILURES"]) or number == 0
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
    parser.addoption("--grpcio", action="store_true")
"""
PYTHON = """#!/bin/sh
environment=$(basename "$(dirname "$(dirname "$0")")")
[ "$2" != pytest ] ||
    echo "environment: $environment $SHM_BACKEND_UTILS_SERVER_VERSION $(basename "$SHM_BACKEND_UTILS_SERVER")"
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
    def environments(self) -> list[str]:
        """The environments in which pytest was run, each with the version of its server."""
        return [found.strip() for found in re.findall(r"^environment:(.*)", self.printed, re.MULTILINE)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One that has a test in each folder, and a setup that does nothing."""
    made = tmp_path / "checkout"
    (made / "scripts/tools").mkdir(parents=True)
    for file in (
        "__init__.py",
        "test",
        "tools/__init__.py",
        "tools/help",
        "tools/processes.py",
        "tools/start",
        "tools/test.py",
    ):
        shutil.copy(ROOT / "scripts" / file, made / "scripts" / file)
    write(made, "scripts/setup", '#!/bin/sh\n[ -z "$*" ] || echo "setup: $*"\n')
    write(made, "tests/conftest.py", CONFTEST)
    write(made, "tests/with_numpy1", "tests/unit/test_[fu]*.py\n")
    write(made, "tests/on_newest", "tests/e2e/test_e*.py\ntests/crash\n")
    for file in ON_OLDEST_PYTHON:
        write(made, file, PASSES)
    for folder in (*SUITE, "docs"):
        write(made, f"tests/{folder}/test_{folder}.py", PASSES)
    return made


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """A server's folder where the checkout looks for the newest."""
    folder = tmp_path / "shared" / "servers" / "triton-2.99"
    write(folder, "bin/tritonserver", "#!/bin/sh\necho '| server_version | 2.99.0 |'\n")
    return folder


def write(checkout: Path, name: str, text: str) -> None:
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(checkout: Path, *arguments: str, **counts: tuple[int, int]) -> subprocess.Popen[str]:
    for environment in (".venv", ".venv-py3.10", ".venv-numpy1", ".venv-py3.12-numpy1"):
        name = "numpy1" if environment == ".venv-numpy1" else "numpy2"
        write(checkout, f"{environment}/bin/python", PYTHON.format(name, *counts.get(name, (1, 0)), sys.executable))
    return subprocess.Popen(
        [checkout / "scripts" / "test", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if not name.startswith("SHM_BACKEND_UTILS_")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(checkout: Path, *arguments: str, **counts: tuple[int, int]) -> Run:
    """Run it in a checkout that has so many tests in each environment, which fail so often there."""
    write(checkout, "tests/unit/test_failing.py", FAILING)
    runs = checkout / "scripts/tools/test.py"
    runs.write_text(runs.read_text().replace('"-n", "3"', '"-n", "0"'))  # three workers take longer than the tests
    process = start(checkout, *arguments, **counts)
    printed, _ = process.communicate()
    return Run(process.returncode, printed, checkout)


def test_two_flakes_are_named_and_pass(checkout: Path) -> None:
    done = run(checkout, numpy2=(2, 1), numpy1=(2, 1))
    heading, *names = done.printed.splitlines()[-3:]
    assert names == [f"{name}: tests/unit/test_failing.py::test_it[1]" for name in (".venv", ".venv-numpy1")]
    assert HEADING.fullmatch(heading)
    assert (done.status, done.runs("numpy2"), done.runs("numpy1")) == (0, 2, 2), done.printed


@pytest.mark.parametrize(("numpy1", "flakes"), [((4, 1), ["3"]), ((3, 2), [])])
def test_three_flakes_or_a_failure_fail_the_run(checkout: Path, numpy1: tuple[int, int], flakes: list[str]) -> None:
    done = run(checkout, "--numpy1", numpy1=numpy1)
    assert (done.status, done.runs("numpy1"), HEADING.findall(done.printed)) == (1, 2, flakes), done.printed


def test_a_run_that_is_killed_has_failed(checkout: Path) -> None:
    write(checkout, "tests/unit/test_killed.py", "import os\n\n\ndef test_it():\n    os.kill(os.getpid(), 9)\n")
    assert run(checkout, "--numpy1").status != 0


def test_an_environment_that_cannot_be_made_is_told_before_any_test(checkout: Path) -> None:
    write(checkout, "scripts/setup", '#!/bin/sh\n[ -z "$*" ] || { echo no NumPy; exit 3; }\n')
    done = run(checkout)
    assert (done.status, done.environments, done.printed) == (3, [], "no NumPy\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_setup_ends_in_good_order_with_the_run_that_needs_it(checkout: Path, number: int) -> None:
    text = '#!/bin/sh\n[ -z "$*" ] || { trap "echo ended; exit" INT; echo on; while :; do sleep 0.1; done; }\n'
    write(checkout, "scripts/setup", text)
    process = start(checkout)
    assert next(iter(process.stdout or ())) == "on\n"
    process.send_signal(number)
    assert (process.communicate()[0].split()[:1], process.returncode) == (["ended"], 128 + number)


def test_a_program_that_begins_as_ctrl_c_comes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    begun: list[Interrupted] = []
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), started(["sleep", "60"]):
        pass
    assert [process.returncode for process in begun] == [-signal.SIGINT]


RUNS = [
    ("checkout", "", [".venv", ".venv-numpy1"], [len(SUITE) + 3, 2]),
    ("checkout", "--all", [".venv", ".venv-numpy1", ".venv-py3.10"], [len(SUITE) + 4, 2, 2]),
    ("checkout", "--python=3.12 --numpy1 --server=0.5.0", [".venv-py3.12-numpy1 0.5.0"], [len(OF_SERVERS) + 1]),
    ("checkout", "--server 0.5.0 tests/e2e -q", [".venv 0.5.0"], [2]),
    ("newest", "--newest", [".venv  triton-2.99"], [2]),
    ("newest", "--newest --all", [".venv  triton-2.99"], [len(ALL_ON_NEWEST) + 1]),
    ("newest", "--newest tests/e2e -q", [".venv  triton-2.99"], [2]),
    ("newest", "--all", [".venv", ".venv-numpy1", ".venv-py3.10", ".venv  triton-2.99"], [len(SUITE) + 4, 2, 2, 4]),
    ("newest", "--server ../shared/servers/triton-2.99", [".venv  triton-2.99"], [len(OF_SERVERS) + 1]),
]


@pytest.mark.long
@pytest.mark.parametrize(("place", "arguments", "ran", "passed"), RUNS)
def test_what_runs_where(place: str, arguments: str, ran: Any, passed: Any, checkout: Path, request: Any) -> None:
    request.getfixturevalue(place)
    done = run(checkout, *arguments.split())
    found = [int(count) for count in re.findall(r"(\d+) passed", done.printed)]
    assert (done.status, done.environments, found) == (0, ran, passed), done.printed


def test_without_a_newest_server_nothing_runs_and_a_line_says_so(checkout: Path) -> None:
    done = run(checkout, "--newest")
    assert (done.status, done.environments) == (0, [])
    assert done.printed.startswith("=== not run on a newer Triton: SHM_BACKEND_UTILS_SERVER_NEWEST names none, and ")


def test_the_tests_that_are_listed_are_there() -> None:
    for file in (WITH_NUMPY_1, ON_NEWEST):
        patterns = file.read_text().split()
        assert patterns
        assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []
