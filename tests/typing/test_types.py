"""What mypy says of what users write. It sees the library as they have it installed, by its ``py.typed``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import shm_backend_utils

FOLDER: Final = Path(__file__).parent
LIBRARY: Final = Path(shm_backend_utils.__file__).parents[1]
OPTIONS: Final = ("--strict", "--follow-imports=silent", "--config-file=")
ERROR: Final = re.compile(r"(\w+\.py):(\d+): error: .* \[([a-z-]+)\]$")
EXPECTED: Final = re.compile(r"  # E: ([a-z-]+)$")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """File, line and code of each error."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("accepted.py", "refused.py"):
        (folder / name).write_text((FOLDER / name).read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *OPTIONS, "accepted.py", "refused.py"],
        cwd=folder,
        env={"MYPYPATH": str(LIBRARY)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert lines, done.stderr
    errors = [ERROR.match(line) for line in lines]
    assert None not in errors, lines
    return [(error[1], int(error[2]), error[3]) for error in errors if error is not None]


@pytest.mark.parametrize("name", ["accepted.py", "refused.py"])
@pytest.mark.timeout(600)
def test_the_type_checker_finds_the_errors_that_there_are_and_no_other(
    found: list[tuple[str, int, str]], name: str
) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    matches = [(number, EXPECTED.search(line)) for number, line in enumerate(lines, 1)]
    expected = [(number, match[1]) for number, match in matches if match is not None]
    assert [(number, code) for file, number, code in found if file == name] == expected


def test_the_user_is_told_that_the_library_has_types() -> None:
    assert (Path(shm_backend_utils.__file__).parent / "py.typed").exists()
