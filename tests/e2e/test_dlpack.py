"""Inside Triton's stub, the Python backend itself takes the call's tensors and gives its own."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from tests.releases import carries_bf16

from .in_band import NUMBERS

SHAPES: Final = [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0)]


@carries_bf16
@pytest.mark.parametrize("path", ["direct", "inline"])
@pytest.mark.parametrize("way", ["takes an input", "takes an output", "gives a tensor", "gives an output back"])
def test_the_backend_exchanges_tensors_of_every_type_and_shape(grpc_client: ShmClient, way: str, path: Any) -> None:
    for shape in SHAPES:
        values = np.arange(shape[0] * shape[1]).reshape(shape) % 5
        given = {n: (values % 2 if n == "BOOL" else values).astype(dtype.numpy) for n, dtype in NUMBERS.items()}
        inputs = {f"IN_{name}": array for name, array in given.items()}
        outputs = {f"OUT_{name}": array.nbytes for name, array in given.items()}
        with grpc_client.infer(
            "dlpack_exchanges", inputs, outputs=outputs, parameters={"way": way}, path=path
        ) as result:
            assert result.overflowed == {}
            for name, array in given.items():
                found = result[f"OUT_{name}"]
                assert (name, found.dtype, found.tolist()) == (name, array.dtype, array[::-1].tolist())
