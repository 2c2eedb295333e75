"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from .auto_complete import auto_complete
from .call import Call
from .context import SequencePart
from .mapping.manager import MemoryInfo, RegionStatus, SharedMemoryManager
from .modes.batch import BatchCall
from .modes.stream import StreamCall
from .session import ShmSession

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
