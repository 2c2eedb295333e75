"""Python's operators in place, on what calls and results hold: ``result["Y"] += 1`` writes to memory, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X = np.ones(16, np.float32)


@pytest.fixture
def client() -> Iterator[ShmClient]:
    with FakeServer(config("m", dims="16")) as server, client_of(server) as client:
        yield client


@pytest.mark.parametrize("path", ["direct", "triton-shm", "inline"])
def test_outputs_and_inputs_can_be_changed_in_place(client: ShmClient, path: Any) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype)}, path=path) as call:
        inputs: Any = call.inputs
        inputs["IN0"][...] = 1
        inputs["IN0"] += X
        with call.infer() as result:
            result["OUT0"] *= 2
            np.testing.assert_array_equal(result["OUT0"], 8 * X)


def test_an_output_cannot_be_replaced(client: ShmClient) -> None:
    with client.infer("m", {"IN0": X}) as result, pytest.raises(TypeError) as error:
        result["OUT0"] = X
    assert str(error.value) == "output 'OUT0' cannot be replaced; write result['OUT0'][...] = array"
