"""DLPack capsules of any kind, made by hand: without a destructor, over memory that stays."""

from __future__ import annotations

import ctypes
from typing import Any

CPU, FLOAT = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_KEPT: list[Any] = []
"""What lives as long as the process: what a capsule of a test points to."""


def _done(_: object) -> None:
    """Delete nothing."""


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_done)


def capsule(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    code: int = FLOAT,
    bits: int = 32,
    lanes: int = 1,
    device: int = CPU,
    byte_offset: int = 0,
    content: bytes = bytes(range(256)),
) -> Any:
    """Return a capsule over memory of its own; without strides it says none."""
    memory = ctypes.create_string_buffer(content, len(content))
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
    tensor = _Tensor()
    tensor.data = ctypes.addressof(memory)
    tensor.device_type, tensor.device_id, tensor.ndim = device, 0, len(shape)
    tensor.code, tensor.bits, tensor.lanes = code, bits, lanes
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    if steps is not None:
        tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    tensor.byte_offset = byte_offset
    tensor.deleter = _DELETER
    _KEPT.append((memory, sizes, steps, tensor))
    return _new(ctypes.addressof(tensor), b"dltensor", None)


class Speaker:
    """A tensor of another library, which notes how it is asked."""

    def __init__(self, made: object, device: tuple[int, int] = (CPU, 0)) -> None:
        self.made = made
        self.device = device
        self.asked: list[Any] = []

    def __dlpack__(self, stream: Any = "nothing") -> Any:
        self.asked.append(stream)
        return self.made

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
