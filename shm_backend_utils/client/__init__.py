"""The half that applications import. It needs ``tritonclient`` (``pip install triton-shm-backend-utils[client]``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .extra import what_is_missing_told

with what_is_missing_told():
    import tritonclient.utils  # noqa: F401

from ..errors import (
    BatchSizeError,
    CallerError,
    ClosedError,
    MachineError,
    MissingTensorError,
    ModelError,
    NoSharedMemoryError,
    PeerError,
    ShmError,
    SlotInDoubtError,
    TableError,
    TensorError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
)
from ..gpu.arrays.device_array import DeviceArray
from ..gpu.errors import CudaError
from ..memory.access import Access
from ..memory.pool.options import PoolOptions
from ..moved import moved
from .aio import AsyncShmClient
from .client import ShmClient
from .errors import (
    BudgetError,
    ConnectionLostError,
    DeadlineExceededError,
    ForkedError,
    InferenceError,
    InputMissingError,
    LivenessUnknownError,
    MemoryRefusedError,
    OutputRoomError,
    PathUnavailableError,
    PoolExhaustedError,
    ServerUnavailableError,
    TimeoutValueError,
    TlsError,
    UnknownHostError,
)
from .explanation import Check, ClientStats, Explanation
from .known_model import CopyWarning
from .options import RequestOptions, Tls
from .prepared import AsyncPreparedCall, PreparedCall
from .result import Result

logging.getLogger("shm_backend_utils").addHandler(logging.NullHandler())  # quiet, unless the application listens

__all__ = [
    "Access",
    "AsyncPreparedCall",
    "AsyncShmClient",
    "BatchSizeError",
    "BudgetError",
    "CallerError",
    "Check",
    "ClientStats",
    "ClosedError",
    "ConnectionLostError",
    "CopyWarning",
    "CudaError",
    "DeadlineExceededError",
    "DeviceArray",
    "Explanation",
    "ForkedError",
    "InferenceError",
    "InputMissingError",
    "LivenessUnknownError",
    "MachineError",
    "MemoryRefusedError",
    "MissingTensorError",
    "ModelError",
    "NoSharedMemoryError",
    "OutputRoomError",
    "PathUnavailableError",
    "PeerError",
    "PoolExhaustedError",
    "PoolOptions",
    "PreparedCall",
    "RequestOptions",
    "Result",
    "ServerUnavailableError",
    "ShmClient",
    "ShmError",
    "SlotInDoubtError",
    "TableError",
    "TensorError",
    "TensorNameError",
    "TensorShapeError",
    "TensorTypeError",
    "TimeoutValueError",
    "Tls",
    "TlsError",
    "UnknownHostError",
]

if TYPE_CHECKING:
    from ..compat.attach import *  # noqa: F403
else:
    __getattr__ = moved(__name__, "shm_backend_utils.compat.attach")


def __dir__() -> list[str]:
    return __all__
