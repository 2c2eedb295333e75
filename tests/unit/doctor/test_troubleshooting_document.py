"""docs/troubleshooting.md has every trouble that the doctor knows, in its words; each has one name and one remedy."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.doctor.troubles import Trouble

ROOT: Final = Path(__file__).resolve().parents[3]
DOCUMENT: Final = (ROOT / "docs" / "troubleshooting.md").read_text()
ALL: Final[list[Trouble]] = list(Trouble)
TESTS: Final = [*(ROOT / "tests" / "unit" / "doctor").glob("test_*.py"), ROOT / "tests" / "e2e" / "test_doctor.py"]


def row_of(trouble: Trouble) -> str:
    cells = (f"`{trouble.code}`", "yes" if trouble.is_fatal else "no", trouble.what, trouble.remedy)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_page_has_each_trouble_once_and_each_section_is_in_the_order_of_codes() -> None:
    sections = [[line for line in part.splitlines() if line.startswith("| `")] for part in DOCUMENT.split("\n## ")]
    assert sorted(itertools.chain(*sections)) == sorted(map(row_of, ALL))
    assert [rows for rows in sections if rows != sorted(rows)] == []


def test_a_code_is_a_name_and_belongs_to_one_trouble() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", trouble.code) for trouble in ALL)
    assert list(Trouble.__members__) == [trouble.name for trouble in ALL], "two have the same words"


def test_what_is_wrong_and_what_to_do_are_sentences() -> None:
    assert [each.code for each in ALL if not (each.what.endswith(".") and each.remedy.endswith("."))] == []


def test_each_is_broken_by_a_test() -> None:
    said = "\n".join(file.read_text() for file in TESTS if file != Path(__file__))
    lacking = [each.code for each in ALL if f'"{each.code}"' not in said and not re.search(rf"\b{each.name}\b", said)]
    assert lacking == []
