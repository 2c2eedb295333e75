"""Which tensors this Triton's Python backend can exchange with this NumPy."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from shm_backend_utils import dtypes

NUMBERS: Final = {name: dtype for name, dtype in dtypes.BY_NAME.items() if dtype is not dtypes.BYTES}
"""The data types that go every way."""

strings_in_band: Final = pytest.mark.needs_triton(
    "2.52" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "2",
    "older stubs were built for NumPy 1: with NumPy 2, they die of strings that come with a request",
)
EVERY_PATH_OF_STRINGS: Final = [
    "direct",
    *[pytest.param(path, marks=strings_in_band) for path in ("triton-shm", "inline")],
]
