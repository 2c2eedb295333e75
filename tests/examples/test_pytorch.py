"""PyTorch reads and writes the client's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.pytorch.client import SHAPE
from examples.pytorch.measure import measure
from shm_backend_utils.client import ShmClient

from ..e2e.own_regions import lies_in_shared_memory
from .recipes import run_script

torch: Any = pytest.importorskip(
    "torch", reason="PyTorch is not installed: scripts/setup installs its build for CPUs in .venv, where pip finds it"
)


def test_the_client_says_what_the_first_pixel_is(url: str) -> None:
    printed = run_script("pytorch/client.py", url)
    assert printed.startswith("path direct: class ")
    assert printed.endswith("all together 100%\n")


def test_the_probabilities_lie_in_the_clients_memory_and_follow_the_input(url: str) -> None:
    shapes = {"LOGITS": (SHAPE, np.float32)}
    with ShmClient(url) as client, client.prepare("probabilities", shapes, path="direct") as call:
        call.inputs["LOGITS"].fill(0)
        for likely in (3, 5):
            call.inputs["LOGITS"][likely] = likely * 100
            probabilities = call.infer()["PROBABILITIES"]
            assert lies_in_shared_memory(probabilities)
            assert (probabilities[likely] == 1).all()


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1).values()) > 0
