"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from .auto_complete import auto_complete
from .call import Call
from .manager import MemoryInfo, RegionStatus, SharedMemoryManager
from .session import ShmSession

__all__ = ["Call", "MemoryInfo", "RegionStatus", "SharedMemoryManager", "ShmSession", "auto_complete"]
