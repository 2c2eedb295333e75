"""ONNX Runtime reads and writes the client's memory."""

from __future__ import annotations

import numpy as np
import onnx

from examples.onnx_runtime.client import SHAPE
from examples.onnx_runtime.make_model import FILE, network
from examples.onnx_runtime.measure import measure
from shm_backend_utils.client import ShmClient

from ..e2e.own_regions import lies_in_shared_memory
from .recipes import run_script


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


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1).values()) > 0
