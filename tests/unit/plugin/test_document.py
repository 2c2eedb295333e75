"""docs/testing.md is right: its files, in an empty folder, are a tested model."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.plugin.outcomes import outcome_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "testing.md"
FILE = re.compile(r"^`([\w/.]+)`\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_its_files_are_a_tested_model(tmp_path: Path) -> None:
    files = dict(FILE.findall(DOCUMENT.read_text()))
    assert len(files) == 3
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    status, printed = outcome_of(tmp_path, "")
    assert (status, "4 passed" in printed) == (0, True), printed
