"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from .auto_complete import auto_complete
from .batch import BatchCall
from .call import Call
from .incoming import SequencePart
from .manager import MemoryInfo, RegionStatus, SharedMemoryManager
from .session import ShmSession
from .stream import StreamCall

__all__ = [
    "BatchCall",
    "Call",
    "MemoryInfo",
    "RegionStatus",
    "SequencePart",
    "SharedMemoryManager",
    "ShmSession",
    "StreamCall",
    "auto_complete",
]
