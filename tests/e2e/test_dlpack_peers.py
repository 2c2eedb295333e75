"""Inside Triton's stub, NumPy, PyTorch and the Python backend itself take the call's tensors and give theirs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer
from tests.releases import carries_bf16

from .in_band import NUMBERS

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: scripts/setup installs its build for CPUs in .venv, where pip finds it",
)

WAYS: Final = {
    "takes an input": ["numpy", "torch", "pb_utils"],
    "takes an output": ["numpy", "torch", "pb_utils"],
    "takes an unversioned capsule": ["torch"],
    "gives a tensor": ["numpy", "torch", "pb_utils"],
    "gives a transposed tensor": ["numpy", "torch"],
    "gives every other row": ["numpy", "torch"],
    "gives an output back": ["numpy", "torch", "pb_utils"],
}
EXCHANGES: Final = [
    pytest.param(peer, way, marks=needs_torch if peer == "torch" else (), id=f"{peer} {way}")
    for way, peers in WAYS.items()
    for peer in peers
]
SHAPES: Final = [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0)]


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    """A client of one protocol, with time for the model to import PyTorch: what the model does is the same for all."""
    with ShmClient(triton_server.grpc_url, timeout_s=60, inline_bytes=0) as client:
        yield client


def tensors(peer: str, shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """Return a tensor of every data type that the peer knows, with other rows at the top than at the bottom."""
    known = {name: dtype for name, dtype in NUMBERS.items() if dtype is not dtypes.BF16 or peer != "numpy"}
    values = np.arange(shape[0] * shape[1]).reshape(shape) % 5
    return {name: (values % 2 if name == "BOOL" else values).astype(dtype.numpy) for name, dtype in known.items()}


@carries_bf16
@pytest.mark.parametrize("path", ["direct", "inline"])
@pytest.mark.parametrize(("peer", "way"), EXCHANGES)
def test_a_peer_exchanges_tensors_of_every_data_type_and_shape(
    client: ShmClient, peer: str, way: str, path: Any
) -> None:
    for shape in SHAPES:
        given = tensors(peer, shape)
        inputs = {f"IN_{name}": array for name, array in given.items()}
        outputs = {f"OUT_{name}": array.nbytes for name, array in given.items()}
        parameters = {"peer": peer, "way": way}
        with client.infer("dlpack_peers", inputs, outputs=outputs, parameters=parameters, path=path) as result:
            assert result.overflowed == {}
            for name, array in given.items():
                found = result[f"OUT_{name}"]
                assert (name, found.dtype, found.tolist()) == (name, array.dtype, array[::-1].tolist())


@carries_bf16
@pytest.mark.parametrize(("peer", "way"), [each for each in EXCHANGES if each.values[1] == "gives a tensor"])
def test_what_a_peer_gives_comes_back_in_the_response_if_it_finds_no_room(
    client: ShmClient, peer: str, way: str
) -> None:
    given = tensors(peer, (3, 4))
    inputs = {f"IN_{name}": array for name, array in given.items()}
    outputs = {f"OUT_{name}": 0 for name in given}
    parameters = {"peer": peer, "way": way}
    with client.infer("dlpack_peers", inputs, outputs=outputs, parameters=parameters) as result:
        assert set(result.overflowed) == set(outputs)
        for name, array in given.items():
            np.testing.assert_array_equal(result[f"OUT_{name}"], array[::-1])
