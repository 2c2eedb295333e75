"""Arrays that are not the model's, and some that are for all that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient, TensorError
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

ROW = np.ones(3, np.float32)


@pytest.fixture
def client() -> Iterator[ShmClient]:
    models = [
        config("vector"),
        config("triple", dims="3"),
        config("image", dims="-1,-1,3"),
        config("rows", dims="3", max_batch_size=4),
    ]
    with FakeServer(*models) as server, client_of(server) as client:
        yield client


def takes(dtype: str) -> str:
    return f"but the model's configuration says {dtype}"


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (
            "vector",
            np.array(3, np.float32),
            f"tensor 'IN0' has shape [], {takes('[-1]')} (-1 is any size); give it its dimensions, by "
            "array.reshape(...), or pass a plain number",
        ),
        ("triple", 3.0, f"tensor 'IN0' has shape [], {takes('[3]')}; give it its dimensions, by array.reshape(...)"),
        ("triple", np.ones(4, np.float32), f"tensor 'IN0' has shape [4], {takes('[3]')}"),
        (
            "image",
            5.0,
            f"tensor 'IN0' has shape [], {takes('[-1, -1, 3]')} (-1 is any size); give it its dimensions, by "
            "array.reshape(...)",
        ),
        (
            "rows",
            ROW,
            f"tensor 'IN0' has shape [3], {takes('[-1, 3]')} (-1 is any size); the first dimension is the batch: one "
            "row has shape [1, 3], as array[np.newaxis] has",
        ),
        (
            "rows",
            np.ones((9, 3), np.float32),
            "tensor 'IN0' has a batch of 9, but model 'rows' takes 1 to 4; split=True sends several requests",
        ),
        ("rows", np.ones((0, 3), np.float32), "tensor 'IN0' has a batch of 0, but model 'rows' takes 1 to 4"),
    ],
)
def test_an_array_that_the_model_does_not_take(client: ShmClient, model: str, given: Any, text: str) -> None:
    with pytest.raises(TensorError) as error:
        client.infer(model, {"IN0": given})
    assert str(error.value) == text


def test_an_input_that_is_misspelt(client: ShmClient) -> None:
    with pytest.raises(TensorError) as error:
        client.infer("vector", {"in0": ROW})
    assert str(error.value) == "model 'vector' has no input 'in0'; it has IN0; did you mean 'IN0'?"


@pytest.mark.parametrize("shape", [(np.int64(2), np.uint8(3)), np.array([2, 3]), [2, np.int32(3)]])
def test_sizes_of_numpy_are_sizes(client: ShmClient, shape: Any) -> None:
    hint: Any = {"OUT0": (tuple(shape), np.float32)}
    with client.prepare("rows", {"IN0": (shape, np.float32)}, outputs=hint) as call:
        assert call.inputs["IN0"].shape == (2, 3)
    with client.infer("vector", {"IN0": ROW}, outputs={"OUT0": np.int64(100)}) as result:
        assert result["OUT0"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(2.0, 3), "23", (-1, 3), (None, 3)])
def test_sizes_that_are_none(client: ShmClient, shape: Any) -> None:
    with pytest.raises(TensorError) as error:
        client.prepare("rows", {"IN0": (shape, np.float32)})
    assert str(error.value) == f"tensor 'IN0' has shape {shape!r}; expected whole numbers, 0 or more"
