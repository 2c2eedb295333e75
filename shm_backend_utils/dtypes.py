"""The one table of data types: Triton's names beside NumPy's and DLPack's.

Triton's names are those of ``model_config.proto`` (without ``TYPE_``) and of the KServe v2 protocol, with one
exception: the configuration's ``TYPE_STRING`` is ``BYTES`` on the wire. DLPack's codes are those of ``dlpack.h``.
``BYTES`` has no fixed item size and ``BF16`` no NumPy type, so neither is in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import TensorTypeError

__all__ = ["BY_NAME", "DType", "from_config", "from_numpy"]

_DL_INT: Final = 0
_DL_UINT: Final = 1
_DL_FLOAT: Final = 2
_DL_BOOL: Final = 6


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table.

    Attributes
    ----------
    name : str
        Triton's name, for example ``"FP32"``.
    numpy : numpy.dtype
        In native byte order.
    dlpack_code, dlpack_bits : int
        ``DLDataType.code`` and ``DLDataType.bits``; lanes are always 1.
    itemsize : int
        Bytes per element.
    """

    name: str
    numpy: np.dtype[Any]
    dlpack_code: int
    dlpack_bits: int
    itemsize: int


def _row(name: str, numpy_type: type[np.generic], dlpack_code: int) -> DType:
    numpy = np.dtype(numpy_type)
    return DType(name, numpy, dlpack_code, numpy.itemsize * 8, numpy.itemsize)


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
)

BY_NAME: Final[Mapping[str, DType]] = MappingProxyType({row.name: row for row in _TABLE})
_BY_NUMPY: Final[Mapping[np.dtype[Any], DType]] = MappingProxyType({row.numpy: row for row in _TABLE})
_NAMES: Final = ", ".join(BY_NAME)


def from_numpy(dtype: npt.DTypeLike, tensor: str) -> DType:
    """Return the row of a NumPy dtype.

    Parameters
    ----------
    dtype : numpy.dtype or what makes one
        Must be in native byte order.
    tensor : str
        The tensor that has this dtype, for the message.

    Raises
    ------
    TensorTypeError
        The dtype has no counterpart in the table.
    """
    numpy = np.dtype(dtype)
    try:
        return _BY_NUMPY[numpy]
    except KeyError:
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} has NumPy dtype {numpy}; supported in shared memory are {_NAMES}"
        ) from None


def from_config(config_name: str) -> DType | None:
    """Return the row of a name from ``config.pbtxt`` (``"TYPE_FP32"``), or None for one that is not in the table."""
    return BY_NAME.get(config_name.removeprefix("TYPE_"))
