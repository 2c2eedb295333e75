"""Changes the sign of an array of BF16, in a process where ml_dtypes is not installed."""

import sys

import numpy as np

sys.modules["ml_dtypes"] = None  # as if it were not installed

from shm_backend_utils.model import Call  # noqa: E402
from tests.served import Served  # noqa: E402

SIGN = np.uint16(0x8000)


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        x = call.input("X")
        assert (x.dtype, x.triton_dtype) == (np.dtype("V2"), "BF16")
        y = call.output("Y", x.shape, "V2")
        np.bitwise_xor(x.numpy().view(np.uint16), SIGN, out=y.numpy().view(np.uint16))
        call.put("SAME", x)
