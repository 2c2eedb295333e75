"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from ..errors import (
    ClosedError,
    DeviceMemoryError,
    ForwardError,
    MissingTensorError,
    ModelError,
    RequestCancelledError,
    ShmError,
    StalledStreamError,
    TensorError,
)
from ..tensors.attributes import BufferAttributes, MemoryType
from ..tensors.device_view import DeviceView
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .auto_complete import auto_complete
from .call import Call
from .context import SequencePart
from .mapping.manager import MemoryInfo, RegionStatus, SharedMemoryManager
from .modes.batch import BatchCall
from .modes.stream import StreamCall
from .session import ShmSession

__all__ = [
    "BatchCall",
    "BufferAttributes",
    "Call",
    "ClosedError",
    "DeviceMemoryError",
    "DeviceView",
    "ForwardError",
    "MemoryInfo",
    "MemoryType",
    "MissingTensorError",
    "ModelError",
    "RegionStatus",
    "RequestCancelledError",
    "SequencePart",
    "SharedMemoryManager",
    "ShmError",
    "ShmSession",
    "StalledStreamError",
    "StreamCall",
    "Strings",
    "StringsView",
    "TensorError",
    "TensorView",
    "auto_complete",
]
