"""ONNX Runtime reads and writes the client's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from examples.onnx_runtime.client import SHAPE
from examples.onnx_runtime.make_model import FILE, network
from examples.onnx_runtime.measure import measure
from shm_backend_utils.client import ShmClient

from ..e2e.mapped import lies_in_shared_memory
from .recipes import Call, load_model, run_script


def test_the_network_is_what_the_script_makes() -> None:
    assert onnx.load(FILE) == network()


def test_the_client_says_what_became_of_its_picture(url: str) -> None:
    assert run_script("onnx_runtime/client.py", url) == "path direct: 0.25 to 0.75 became -0.25 to 1.75\n"


def test_the_sharpened_picture_lies_in_the_clients_memory_and_follows_the_input(url: str) -> None:
    with ShmClient(url) as client, client.prepare("sharpen", {"PICTURE": (SHAPE, np.float32)}, path="direct") as call:
        for value in (1.0, 2.0):
            call.inputs["PICTURE"].fill(value)
            sharpened = call.infer()["SHARPENED"]
            assert lies_in_shared_memory(sharpened)
            assert sharpened[0, :, 1:-1, 1:-1].min() == sharpened[0, :, 1:-1, 1:-1].max() == value


def test_onnx_runtime_works_in_the_calls_memory_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.ones((1, 3, 8, 8), np.float32), np.zeros((1, 3, 8, 8), np.float32)
    _, model = load_model("onnx_runtime", "sharpen")
    bindings = []
    run = model.network.run_with_iobinding

    def run_and_keep(binding: Any) -> None:
        run(binding)
        bindings.append(binding)

    monkeypatch.setattr(model.network, "run_with_iobinding", run_and_keep)
    model.infer(Call(x, y))
    assert y[0, 0, 4, 4] == 1
    assert bindings[0].get_outputs()[0].data_ptr() == y.ctypes.data

    x.fill(3)  # what was bound is the memory: a second run, without the model's code, goes by what is there now
    run(bindings[0])
    assert y[0, 0, 4, 4] == 3


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1).values()) > 0
