"""The half of the library that ``model.py`` imports. It needs only NumPy and the standard library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import errors as shared_errors
from ..errors import (
    ForwardError,
    MissingTensorError,
    RequestCancelledError,
    RequestRefusedError,
    ShmError,
)
from ..moved import moved
from ..tensors.strings import Strings
from ..tensors.view import BufferAttributes, MemoryType, TensorView
from .call import Call
from .config import auto_complete
from .context import SequencePart
from .modes.batch import BatchCall
from .modes.stream import StreamCall
from .session import ShmSession

__all__ = [
    "BatchCall",
    "BufferAttributes",
    "Call",
    "ForwardError",
    "MemoryType",
    "MissingTensorError",
    "RequestCancelledError",
    "RequestRefusedError",
    "SequencePart",
    "ShmError",
    "ShmSession",
    "StreamCall",
    "Strings",
    "TensorView",
    "auto_complete",
]

if TYPE_CHECKING:
    from ..compat.shared_memory_manager import *  # noqa: F403
else:
    __getattr__ = moved(
        __name__,
        {
            **dict.fromkeys(("MemoryInfo", "RegionStatus", "SharedMemoryManager"), "compat.shared_memory_manager"),
            **dict.fromkeys(shared_errors.__all__, "errors"),
            "CudaError": "gpu.errors",
            "DeviceArray": "gpu.arrays.device_array",
            "DeviceView": "gpu.arrays.device_view",
            "StringsView": "tensors.view",
        },
    )


def __dir__() -> list[str]:
    return __all__
