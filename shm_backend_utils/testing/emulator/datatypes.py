"""Triton's data types beside NumPy's and DLPack's, as the stub has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BF16, BY_NAME, BYTES, DType
from .errors import TritonModelException

__all__ = ["of_array", "of_dlpack"]

_INVALID: Final = DType("INVALID", np.dtype("V1"), -1, 0, 1)
"""What the stub takes a DLPack type for that has no counterpart."""

_OF_NUMPY: Final[Mapping[np.dtype[Any], DType]] = MappingProxyType(
    {row.numpy: row for row in BY_NAME.values() if row is not BF16}
)
_OF_DLPACK: Final[Mapping[tuple[int, int], DType]] = MappingProxyType(
    {(row.dlpack_code, row.dlpack_bits): row for row in BY_NAME.values() if row is not BYTES}
)


def of_array(array: npt.NDArray[Any]) -> DType:
    """Return the data type of an array; raises TritonModelException if Triton has none for it."""
    found = _OF_NUMPY.get(array.dtype)
    if found is not None:
        return found
    if array.dtype.type is np.bytes_:
        return BYTES
    raise TritonModelException("NumPy dtype is not supported.")


def of_dlpack(code: int, bits: int, lanes: int) -> DType:
    """Return the data type of a DLPack tensor; TritonModelException if it is a bfloat of other than 16 bits."""
    if lanes == 1 and code == BF16.dlpack_code and bits != BF16.dlpack_bits:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {bits}")
    return _OF_DLPACK.get((code, bits), _INVALID) if lanes == 1 else _INVALID
