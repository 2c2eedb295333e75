"""The one table of data types, with the names and codes of Triton, NumPy and DLPack for each.

Triton's names are those of ``model_config.proto`` (without ``TYPE_``) and of the KServe v2 protocol, with one
exception: the configuration's ``TYPE_STRING`` is ``BYTES`` on the wire. DLPack's codes are those of ``dlpack.h``.
NumPy has no type for ``BF16``. The table uses the type of the package ``ml_dtypes`` or, without that package, two
opaque bytes (``V2``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import TensorTypeError

try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _bfloat16 = "V2"

__all__ = ["BF16", "BYTES", "BY_CONFIG", "BY_NAME", "BY_NUMPY", "LENGTH_SIZE", "DType", "from_numpy"]

_DL_INT: Final = 0
_DL_UINT: Final = 1
_DL_FLOAT: Final = 2
_DL_BFLOAT: Final = 4
_DL_BOOL: Final = 6
_NO_DL: Final = -1


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table."""

    name: str  # Triton's, for example "FP32"
    numpy: np.dtype[Any]  # in native byte order
    dlpack_code: int
    dlpack_bits: int  # lanes are always 1
    itemsize: int  # 0 for strings, each of which has a size of its own


def _row(name: str, numpy_type: npt.DTypeLike, dlpack_code: int) -> DType:
    numpy = np.dtype(numpy_type)
    return DType(name, numpy, dlpack_code, numpy.itemsize * 8, numpy.itemsize)


BF16: Final = _row("BF16", _bfloat16, _DL_BFLOAT)
BYTES: Final = DType("BYTES", np.dtype(object), _NO_DL, 0, 0)
"""Strings. In NumPy they are objects; DLPack has no type for them."""

LENGTH_SIZE: Final = 4
"""Bytes of the little-endian length in front of each string in memory (Triton's form)."""

_TABLE: Final = (
    _row("BOOL", np.bool_, _DL_BOOL),
    _row("UINT8", np.uint8, _DL_UINT),
    _row("UINT16", np.uint16, _DL_UINT),
    _row("UINT32", np.uint32, _DL_UINT),
    _row("UINT64", np.uint64, _DL_UINT),
    _row("INT8", np.int8, _DL_INT),
    _row("INT16", np.int16, _DL_INT),
    _row("INT32", np.int32, _DL_INT),
    _row("INT64", np.int64, _DL_INT),
    _row("FP16", np.float16, _DL_FLOAT),
    _row("FP32", np.float32, _DL_FLOAT),
    _row("FP64", np.float64, _DL_FLOAT),
    BF16,
    BYTES,
)

BY_NAME: Final[Mapping[str, DType]] = MappingProxyType({row.name: row for row in _TABLE})
BY_NUMPY: Final[Mapping[np.dtype[Any], DType]] = MappingProxyType({row.numpy: row for row in _TABLE})
BY_CONFIG: Final[Mapping[str, DType]] = MappingProxyType(
    {"TYPE_STRING" if row is BYTES else f"TYPE_{row.name}": row for row in _TABLE}
)
_NAMES: Final = ", ".join(BY_NAME)


def from_numpy(dtype: npt.DTypeLike, tensor: str) -> DType:
    """Return the row of a NumPy dtype in native byte order; TensorTypeError for ``tensor`` if the table lacks it."""
    try:
        numpy = np.dtype(dtype)
    except TypeError:
        raise TensorTypeError(
            tensor,
            f"tensor {tensor!r} has dtype {dtype!r}, which NumPy does not know; expected for example np.float32, or "
            "for strings 'S20'",
        ) from None
    if numpy.kind in "SUT":
        return BYTES
    try:
        return BY_NUMPY[numpy]
    except KeyError:
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} has NumPy dtype {numpy}; Triton has {_NAMES}: convert it by .astype"
        ) from None
