"""BF16 where ml_dtypes is not installed, in the model's process or in the client's: two bytes each."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import numpy as np

from shm_backend_utils import dtypes
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from tests.releases import carries_bf16

from .flavours import AnyClient

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
