"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from examples.notebook.measure import measure

from .recipes import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook" / "first_steps.ipynb"


def printed(cell: dict[str, Any]) -> str:
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")) for output in cell["outputs"])


def test_every_cell_runs_and_tells_what_it_should(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_URL", url)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    _, explained, inferred, prepared, stats = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "takes the path direct" in explained
    assert inferred.startswith("direct 127.5 ")
    assert [line.split()[0] for line in prepared.splitlines()] == ["50", "100", "150"]
    assert re.search(r"\bpaths\W+direct\W+4\b", stats)


def test_it_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1).values()) > 0
