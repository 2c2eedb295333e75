"""``docs/dependencies.md`` names every dependency with its range, its extras and a reason; and no other."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*])?(.*)$")


def declared() -> dict[str, tuple[str, set[str]]]:
    """Return every dependency of pyproject.toml with its range, and the extras that name it."""
    text = (ROOT / "pyproject.toml").read_text()
    found: dict[str, tuple[str, set[str]]] = {}
    required = next(line for line in text.splitlines() if line.startswith("dependencies = "))
    extra = ""
    for line in [required, *text.split("[project.optional-dependencies]")[1].split("\n[")[0].splitlines()]:
        begin = re.match(r"(\w+) = \[", line)
        extra = begin[1] if begin else extra
        for entry in re.findall(r'"([^"]+)"', line.partition("#")[0]):
            match = REQUIREMENT.match(entry)
            assert match is not None, entry
            if match[1] != "triton-shm-backend-utils":
                found.setdefault(match[1], (match[2], set()))[1].update({extra} - {"dependencies"})
    return found


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the rows of the table that have a licence and a reason."""
    rows = {}
    for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "package":
            name, versions, extras, licence, reason = cells
            assert licence, name
            assert reason, name
            rows[name] = (versions, {extra for extra in extras.split(", ") if extra})
    return rows


def test_every_dependency_has_its_row_and_no_other() -> None:
    assert documented() == declared()


def test_the_table_has_as_many_as_the_installed_package_asks_for() -> None:
    """So that a list that could not be read above is no list that is empty."""
    asked_for = {
        re.split(r"[^A-Za-z0-9_.-]", text)[0].lower() for text in metadata.requires("triton-shm-backend-utils") or []
    }
    assert {"numpy", "tritonclient", "rich", "pytest"} <= asked_for
    assert asked_for - {"triton-shm-backend-utils"} <= {name.lower() for name in documented()}
