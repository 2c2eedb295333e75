"""What mypy and pyright say of what users write. They see the library and the stubs as installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import shm_backend_utils

FOLDER: Final = Path(__file__).parent
LIBRARY: Final = Path(shm_backend_utils.__file__).parents[1]
ACCEPTED: Final = ("accepted.py", "accepted_model.py")
REFUSED: Final = ("refused.py", "refused_model.py")
FILES: Final = ACCEPTED + REFUSED
MYPY_OPTIONS: Final = ("--strict", "--follow-imports=silent", "--config-file=")
MYPY_ERROR: Final = re.compile(r"(\w+\.py):(\d+): error: .* \[([a-z-]+)\]$")
PYRIGHT_OPTIONS: Final = ("--outputjson", "--pythonpath", sys.executable)
PYRIGHT_CONFIGURATION: Final = {"typeCheckingMode": "standard", "strict": ACCEPTED, "reportMissingModuleSource": False}
EXPECTED: Final = re.compile(r"  # E: (?P<mypy>[a-z-]+), (?P<pyright>\w+)$")


class Error(NamedTuple):
    """What a type checker has against a line."""

    file: str
    line: int
    code: str


def errors_of_mypy(folder: Path) -> list[Error]:
    command = [sys.executable, "-m", "mypy", *MYPY_OPTIONS, *FILES]
    done = subprocess.run(
        command, cwd=folder, env={"MYPYPATH": str(LIBRARY)}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert lines, done.stderr
    errors = [MYPY_ERROR.match(line) for line in lines]
    assert None not in errors, lines
    return [Error(error[1], int(error[2]), error[3]) for error in errors if error is not None]


def errors_of_pyright(folder: Path) -> list[Error]:
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT_CONFIGURATION))
    command = [sys.executable, "-m", "pyright", *PYRIGHT_OPTIONS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(FILES)
    return [
        Error(Path(error["file"]).name, 1 + error["range"]["start"]["line"], error.get("rule", ""))
        for error in report["generalDiagnostics"]
    ]


CHECKERS: Final[dict[str, Callable[[Path], list[Error]]]] = {"mypy": errors_of_mypy, "pyright": errors_of_pyright}


@pytest.fixture(scope="module", params=CHECKERS)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Error]]:
    """What one type checker finds in all files."""
    folder = tmp_path_factory.mktemp("user")
    for name in FILES:
        shutil.copy(FOLDER / name, folder)
    return request.param, CHECKERS[request.param](folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.timeout(600)
def test_the_type_checker_finds_the_errors_that_there_are_and_no_other(
    checked: tuple[str, list[Error]], name: str
) -> None:
    checker, errors = checked
    lines = (FOLDER / name).read_text().splitlines()
    matches = [(number, EXPECTED.search(line)) for number, line in enumerate(lines, 1)]
    expected = [Error(name, number, match[checker]) for number, match in matches if match is not None]
    assert [error for error in errors if error.file == name] == expected
