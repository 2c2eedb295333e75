"""docs/testing.md is right: its files, in an empty folder, are a tested model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "testing.md"
FILE = re.compile(r"^`([\w/.]+)`\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_its_files_are_a_tested_model(tmp_path: Path) -> None:
    files = dict(FILE.findall(DOCUMENT.read_text()))
    assert len(files) == 3
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert (done.returncode, "4 passed" in done.stdout) == (0, True), done.stdout
