"""Every type, as the Python backend itself takes and gives it in the stub; BF16 without ml_dtypes is two bytes each."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Final

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from tests.releases import carries_bf16

from .flavours import AnyClient
from .in_band import NUMBERS

BITS: Final = np.array([0x3F80, 0xC000, 0x7F80, 0x7FC1, 0x7F81, 0x8000, 0x0001], np.uint16).view(dtypes.BF16.numpy)
"""1, -2, infinity, two that are no numbers, -0, and the smallest."""


@carries_bf16
def test_a_model_without_ml_dtypes_gets_and_gives_two_bytes_each(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("brain_floats_bare", {"X": BITS}, path=path) as result:
        assert result["SAME"].tobytes() == BITS.tobytes()
        assert result["Y"].tobytes() == (-BITS).tobytes()


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


SHAPES: Final = [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0)]


@carries_bf16
@pytest.mark.parametrize("path", ["direct", "inline"])
def test_the_backend_exchanges_tensors_of_every_type_and_shape(grpc_client: ShmClient, path: PathName) -> None:
    ways = ("takes an input", "takes an output", "gives a tensor", "gives an output back")
    for shape, way in itertools.product(SHAPES, ways):
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
