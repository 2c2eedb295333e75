"""Where a tensor's bytes lie, in the words of ``TRITONSERVER_BufferAttributes``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["BufferAttributes", "MemoryType"]


class MemoryType(IntEnum):
    """The kinds of memory of ``TRITONSERVER_MemoryType``, with its numbers (``tritonserver.h``)."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


@dataclass(frozen=True, slots=True)
class BufferAttributes:
    """The attributes of one tensor's buffer.

    Attributes
    ----------
    memory_type : MemoryType
        The kind of memory.
    memory_type_id : int
        The CUDA device of GPU memory; 0 for CPU memory.
    byte_size : int
        The tensor's size in bytes.
    cuda_ipc_handle : bytes or None
        The 64 bytes of ``cudaIpcMemHandle_t`` through which the memory was opened; None for CPU memory.
    """

    memory_type: MemoryType
    memory_type_id: int
    byte_size: int
    cuda_ipc_handle: bytes | None = None
