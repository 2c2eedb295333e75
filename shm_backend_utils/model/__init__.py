"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import (
    CallerError,
    ClosedError,
    DeviceMemoryError,
    ForwardError,
    MachineError,
    MissingTensorError,
    ModelError,
    PeerError,
    RegionGoneError,
    RegionRefusedError,
    RequestCancelledError,
    RequestRefusedError,
    ShmError,
    StalledStreamError,
    TensorError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
)
from ..gpu.arrays.device_array import DeviceArray
from ..gpu.arrays.device_view import DeviceView
from ..gpu.errors import CudaError
from ..moved import moved
from ..tensors.attributes import BufferAttributes, MemoryType
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .auto_complete import auto_complete
from .call import Call
from .context import SequencePart
from .modes.batch import BatchCall
from .modes.stream import StreamCall
from .session import ShmSession

__all__ = [
    "BatchCall",
    "BufferAttributes",
    "Call",
    "CallerError",
    "ClosedError",
    "CudaError",
    "DeviceArray",
    "DeviceMemoryError",
    "DeviceView",
    "ForwardError",
    "MachineError",
    "MemoryType",
    "MissingTensorError",
    "ModelError",
    "PeerError",
    "RegionGoneError",
    "RegionRefusedError",
    "RequestCancelledError",
    "RequestRefusedError",
    "SequencePart",
    "ShmError",
    "ShmSession",
    "StalledStreamError",
    "StreamCall",
    "Strings",
    "StringsView",
    "TensorError",
    "TensorNameError",
    "TensorShapeError",
    "TensorTypeError",
    "TensorView",
    "auto_complete",
]

if TYPE_CHECKING:
    from ..compat.shared_memory_manager import *  # noqa: F403
else:
    __getattr__ = moved(__name__, "shm_backend_utils.compat.shared_memory_manager")


def __dir__() -> list[str]:
    return __all__
