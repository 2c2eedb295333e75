"""The README's examples for clients do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.server import EmbeddedServer

README = Path(__file__).resolve().parents[2] / "README.md"
IMAGES = np.random.default_rng(0).random((8, 3, 224, 224), np.float32)


def client_examples() -> list[str]:
    section = README.read_text().partition("## The client")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


class Camera:
    def read_into(self, array: npt.NDArray[Any]) -> None:
        array[:8] = array[8:] = IMAGES


def test_there_are_three() -> None:
    assert len(client_examples()) == 3


def run(example: str, server: EmbeddedServer) -> tuple[list[npt.NDArray[Any]], dict[str, Any]]:
    """Run an example, and return what it used, and its variables."""
    used: list[npt.NDArray[Any]] = []
    names = {"images": IMAGES, "camera": Camera(), "use": lambda array: used.append(array.copy())}
    assert "localhost:8001" in example
    exec(example.replace("localhost:8001", server.grpc_url), names)
    return used, names


def test_infer(triton_server: EmbeddedServer) -> None:
    used, names = run(client_examples()[0], triton_server)
    np.testing.assert_array_equal(used, [IMAGES * 2])
    np.testing.assert_array_equal(names["doubled"], np.concatenate([IMAGES * 2] * 3))


def test_prepare(triton_server: EmbeddedServer) -> None:
    used, _ = run(client_examples()[1], triton_server)
    np.testing.assert_array_equal(used, [np.concatenate([IMAGES * 2] * 2)] * 3)


def test_tasks(triton_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
    used, _ = run(client_examples()[2], triton_server)
    np.testing.assert_array_equal(np.concatenate(used), IMAGES * 2)
    assert "takes the path direct" in capsys.readouterr().out
