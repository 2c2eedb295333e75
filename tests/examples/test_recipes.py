"""Each recipe does what it says; the web service has a file of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import nbformat
import numpy as np
import onnx
import pytest
from nbclient import NotebookClient

from examples.onnx_runtime.client import SHAPE
from examples.onnx_runtime.make_model import FILE, network
from examples.producers.client import rate, run
from examples.pytorch.client import SHAPE as LOGITS
from examples.video.client import edges_of, make_video
from shm_backend_utils.client import ShmClient

from ..e2e.own_regions import lies_in_shared_memory
from .conftest import EXAMPLES

MEASURED: Final[dict[str, dict[str, int]]] = {
    "notebook": {},
    "onnx_runtime": {},
    "producers": {"producers": 2, "windows": 2},
    "pytorch": {},
    "video": {"frames": 3},
    "web_service": {},
}


def run_script(script: str, *arguments: str) -> str:
    """Run a recipe's script as a user would, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def need_torch() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup does it, where pip finds its build")


@pytest.mark.parametrize("recipe", MEASURED)
def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str, recipe: str) -> None:
    if recipe == "pytorch":
        need_torch()
    measure = import_module(f"examples.{recipe}.measure").measure
    assert min(measure(url, rounds=1, **MEASURED[recipe]).values()) > 0


# ONNX Runtime and PyTorch


def test_the_network_is_what_the_script_makes() -> None:
    assert onnx.load(FILE) == network()


def test_the_sharpened_picture_lies_in_the_clients_memory_and_follows_the_input(url: str) -> None:
    assert run_script("onnx_runtime/client.py", url) == "path direct: 0.25 to 0.75 became -0.25 to 1.75\n"
    with ShmClient(url) as client, client.prepare("sharpen", {"PICTURE": (SHAPE, np.float32)}, path="direct") as call:
        for value in (1.0, 2.0):
            call.inputs["PICTURE"].fill(value)
            sharpened = call.infer()["SHARPENED"]
            assert lies_in_shared_memory(sharpened)
            assert sharpened[0, :, 1:-1, 1:-1].min() == sharpened[0, :, 1:-1, 1:-1].max() == value


def test_the_probabilities_lie_in_the_clients_memory_and_follow_the_input(url: str) -> None:
    need_torch()
    assert re.fullmatch(r"path direct: class .*all together 100%\n", run_script("pytorch/client.py", url), re.DOTALL)
    shapes = {"LOGITS": (LOGITS, np.float32)}
    with ShmClient(url) as client, client.prepare("probabilities", shapes, path="direct") as call:
        call.inputs["LOGITS"].fill(0)
        for likely in (3, 5):
            call.inputs["LOGITS"][likely] = likely * 100
            probabilities = call.infer()["PROBABILITIES"]
            assert lies_in_shared_memory(probabilities)
            assert (probabilities[likely] == 1).all()


# Several processes feed one model, each with a client of its own.


def test_every_producer_gets_the_answers_to_its_own_windows(url: str) -> None:
    done = run(url, producers=3, windows=8)
    assert [(each.windows, each.highest) for each in done] == [(8, 0.875), (8, 1.875), (8, 2.875)]
    assert rate(done) > 0
    assert re.match(r"4 producers, .*windows a second", run_script("producers/client.py", url), re.DOTALL)


# The video: every frame's edges, in order, without a copy of a frame.


def test_the_edges_of_all_frames_come_in_order_and_who_stops_early_leaves_nothing(url: str, tmp_path: Path) -> None:
    video = tmp_path / "square.avi"
    make_video(video, size=(320, 240), frames=12)
    columns = []
    for edges in edges_of(video, url):
        assert lies_in_shared_memory(edges)
        columns.append(int(edges.any(axis=0).argmax()))
        del edges
    assert len(columns) == 12
    # In the first the square touches the border.
    assert [later - earlier for earlier, later in pairwise(columns[1:])] == [8] * 10
    frames = edges_of(video, url)
    assert next(frames).any()
    frames.close()  # type: ignore[attr-defined]  # it is a generator


def test_the_script_makes_a_video_and_says_where_the_edges_are(url: str, tmp_path: Path) -> None:
    lines = run_script("video/client.py", str(tmp_path / "new.avi"), url).splitlines()
    assert len(lines) == 50
    assert lines[10].startswith("frame 10: the leftmost edge is in column ")


# The notebook runs from its first cell to its last.


def printed(cell: dict[str, Any]) -> str:
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")) for output in cell["outputs"])


def test_every_cell_runs_and_tells_what_it_should(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = EXAMPLES / "notebook" / "first_steps.ipynb"
    committed = json.loads(file.read_text())["cells"]
    assert [cell for cell in committed if cell.get("outputs") or cell.get("execution_count")] == []
    monkeypatch.setenv("TRITON_URL", url)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    _, explained, inferred, prepared, stats = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "takes the path direct" in explained
    assert inferred.startswith("direct 127.5 ")
    assert [line.split()[0] for line in prepared.splitlines()] == ["50", "100", "150"]
    assert re.search(r"\bpaths\W+direct\W+4\b", stats)
