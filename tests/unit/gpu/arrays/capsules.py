"""What a DLPack capsule says, read and changed without the code under test; after ``dlpack.h``."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

_TENSOR_IN_VERSIONED = 32  # version, context, deleter and flags come first
_DEVICE = 8


class Content(NamedTuple):
    data: int
    device: tuple[int, int]
    data_type: tuple[int, int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int


def name_of(capsule: object) -> bytes:
    get = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    name = get(capsule)
    assert isinstance(name, bytes)
    return name


def content(capsule: object) -> Content:
    data, device_type, device, ndim, code, bits, lanes, shape, strides, byte_offset = struct.unpack(
        "<QiiiBBHQQQ", ctypes.string_at(_tensor(capsule), 48)
    )
    return Content(
        data,
        (device_type, device),
        (code, bits, lanes),
        _numbers(shape, ndim) or (),
        _numbers(strides, ndim),
        byte_offset,
    )


def version_and_flags(capsule: object) -> tuple[int, int, int]:
    major, minor, _, _, flags = struct.unpack("<IIQQQ", ctypes.string_at(pointer(capsule), 32))
    return major, minor, flags


def onto_device(capsule: Any, device_type: int, device: int = 0) -> Any:
    """Write another device into a capsule: host memory is read as a GPU's, or the other way round."""
    ctypes.memmove(_tensor(capsule) + _DEVICE, struct.pack("<ii", device_type, device), 8)
    return capsule


def _tensor(capsule: object) -> int:
    return pointer(capsule) + (_TENSOR_IN_VERSIONED if name_of(capsule) == b"dltensor_versioned" else 0)


def pointer(capsule: object) -> int:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    address = get(capsule, name_of(capsule))
    assert isinstance(address, int)
    return address


def _numbers(address: int, count: int) -> tuple[int, ...] | None:
    return struct.unpack(f"<{count}q", ctypes.string_at(address, 8 * count)) if address else None
