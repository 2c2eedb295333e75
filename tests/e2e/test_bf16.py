"""BF16, for which NumPy has no type: on every path, with ml_dtypes and without, to the bit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import TensorTypeError
from shm_backend_utils.server import EmbeddedServer
from tests.releases import carries_bf16

from .flavours import AnyClient
from .mapped import lies_in_shared_memory

BF16: Final = dtypes.BF16.numpy
X: Final = np.array([1, -2, 0.5, 0, -0.0, np.inf, 1e38], BF16)
BITS: Final = np.array([0x3F80, 0xC000, 0x7F80, 0x7FC1, 0x7F81, 0x8000, 0x0001], np.uint16).view(BF16)
"""1, -2, infinity, two that are no numbers, -0, and the smallest."""

KINDS: Final[dict[str, Any]] = {
    "array": X,
    "big-endian": X.astype(BF16.newbyteorder(">")),
    "reversed": X[::-1].copy()[::-1],
    "every other": np.repeat(X, 2)[::2],
    "Python's numbers": X.tolist(),
}


def infer(client: AnyClient, x: Any, model: str = "brain_floats", **named: Any) -> dict[str, npt.NDArray[Any]]:
    with client.infer(model, {"X": x}, **named) as result:
        return result.copy()


@carries_bf16
def test_it_goes_and_comes(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("brain_floats", {"X": X}, path=path) as result:
        assert result.path == path
        assert result["Y"].dtype == result["SAME"].dtype == BF16
        assert result["Y"].tolist() == (X + X).tolist()
        assert result["SAME"].tolist() == X.tolist()


@carries_bf16
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_whatever_held_it(client: ShmClient, path: PathName, kind: str) -> None:
    assert infer(client, KINDS[kind], path=path, outputs=["SAME"])["SAME"].tolist() == X.tolist()


@carries_bf16
def test_every_bit_is_kept(client: ShmClient, path: PathName) -> None:
    assert infer(client, BITS, path=path, outputs=["SAME"])["SAME"].tobytes() == BITS.tobytes()


@carries_bf16
@pytest.mark.parametrize("x", [X[:0], X[:1]], ids=["none", "one"])
def test_no_number_or_one(client: ShmClient, path: PathName, x: npt.NDArray[Any]) -> None:
    found = infer(client, x, path=path)
    assert (found["Y"].dtype, found["Y"].tolist()) == (BF16, (x + x).tolist())


def test_a_prepared_call_lies_in_shared_memory_both_ways(any_client: AnyClient) -> None:
    hints = {"Y": ((7,), BF16), "SAME": None}
    with any_client.prepare("brain_floats", {"X": ((7,), BF16)}, outputs=hints) as call:
        for x in (X, -X):
            call.inputs["X"][:] = x
            with call.infer() as result:
                assert result.overflowed == {}
                assert lies_in_shared_memory(result["Y"])
                assert result["Y"].tolist() == (x + x).tolist()
                assert result["SAME"].ctypes.data == call.inputs["X"].ctypes.data


@carries_bf16
def test_an_output_that_finds_no_room_comes_back_in_the_response(any_client: AnyClient) -> None:
    with any_client.infer("brain_floats", {"X": BITS}, outputs={"SAME": 0, "Y": 0}, path="direct") as result:
        assert result.overflowed == {"Y": BITS.nbytes}  # the other is an input's memory, and needs no room
        assert result["Y"].dtype == BF16
    with any_client.infer("brain_floats", {"X": X}, outputs=["Y"], path="direct") as result:
        assert result.overflowed == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16, "V2"], ids=str)
def test_two_bytes_of_another_type_are_refused(client: ShmClient, path: PathName, dtype: Any) -> None:
    with pytest.raises(TensorTypeError, match="tensor 'X' "):
        client.infer("brain_floats", {"X": np.zeros(4, dtype)}, path=path)


@carries_bf16
def test_a_model_without_ml_dtypes_gets_and_gives_two_bytes_each(client: ShmClient, path: PathName) -> None:
    found = infer(client, BITS, "brain_floats_bare", path=path)
    assert found["SAME"].tobytes() == BITS.tobytes()
    assert found["Y"].tobytes() == (-BITS).tobytes()


@carries_bf16
def test_what_a_model_without_ml_dtypes_gives_comes_back_in_the_response_if_it_finds_no_room(client: ShmClient) -> None:
    assert infer(client, BITS, "brain_floats_bare", outputs={"Y": 0})["Y"].tobytes() == (-BITS).tobytes()


CLIENT_WITHOUT_ML_DTYPES: Final = """
import sys, types
sys.modules["ml_dtypes"] = types.ModuleType("ml_dtypes")  # tritonclient wants one, but this one has no types
import numpy as np
from shm_backend_utils.client import ShmClient

bits = np.array([0x3F80, 0x8000], np.uint16).view("V2")
with ShmClient(sys.argv[1]) as client:
    with client.infer("brain_floats", {"X": bits}, outputs=["SAME"]) as result:
        same = result["SAME"]
    with client.prepare("brain_floats", {"X": ((2,), "V2")}, outputs={"Y": ((2,), "V2")}) as call:
        call.inputs["X"][:] = bits
        with call.infer() as result:
            print(same.dtype, same.tobytes() == bits.tobytes(), result["Y"].dtype, result["Y"].view(np.uint16).tolist())
"""


def test_a_client_without_ml_dtypes_gives_and_gets_two_bytes_each(triton_server: EmbeddedServer) -> None:
    program = [sys.executable, "-c", CLIENT_WITHOUT_ML_DTYPES, triton_server.grpc_url]
    said = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == f"|V2 True |V2 {[0x4000, 0x8000]}\n"
