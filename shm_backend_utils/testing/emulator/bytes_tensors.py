"""Strings as Triton has them in memory: before each one its length, 4 bytes, little-endian."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["deserialize_bytes_tensor", "serialize_byte_tensor"]

_LENGTH = struct.Struct("<I")


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """Return strings in C order, each after its length; an empty tuple for no elements, None if there are no strings.

    They are objects, or NumPy's bytes, which lose their last zeros. An object that is no bytes is written as its
    ``str``.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype == np.object_:
        elements = [item if type(item) is bytes else str(item).encode() for item in input_tensor.ravel().tolist()]
    elif input_tensor.dtype.type is np.bytes_:
        elements = input_tensor.ravel().tolist()
    else:
        return None
    return b"".join([part for element in elements for part in (_LENGTH.pack(len(element)), element)])


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """Return the strings that lie in memory, as an array of one axis of objects, which are bytes.

    struct.error if a length reaches beyond the end.
    """
    found = []
    offset = 0
    while offset < len(encoded_tensor):
        (length,) = _LENGTH.unpack_from(encoded_tensor, offset)
        offset += _LENGTH.size
        found.append(struct.unpack_from(f"<{length}s", encoded_tensor, offset)[0])
        offset += length
    return np.array(found, dtype=np.object_)
