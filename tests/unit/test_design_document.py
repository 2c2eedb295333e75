"""The tests that docs/design.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
TEXT = (ROOT / "docs" / "design.md").read_text()


def test_each_test_that_is_named_is_there() -> None:
    names = set(re.findall(r"`(test_\w+)`", TEXT))
    assert names
    assert names - TESTS == set()


def test_each_threat_has_a_test() -> None:
    table = TEXT.partition("| threat | what happens | test |\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:] if not row.startswith("| **")]
    assert [row for row in rows if len(row) != 3 or "`test_" not in row[2]] == []
