"""The half that applications import. It needs ``tritonclient`` (``pip install triton-shm-backend-utils[client]``)."""

from __future__ import annotations

import logging

from ..errors import (
    CallerError,
    ClosedError,
    MachineError,
    MissingTensorError,
    PeerError,
    ShmError,
    SlotInDoubtError,
    TensorError,
)
from ..memory.pool.options import PoolOptions
from ..memory.segment import Access
from .aio import AsyncShmClient
from .attach import Attached, CudaRegion, attach
from .client import ShmClient
from .errors import (
    BudgetError,
    ConnectionLostError,
    DeadlineExceededError,
    ForkedError,
    InferenceError,
    InputMissingError,
    OutputRoomError,
    PathUnavailableError,
    PoolExhaustedError,
    ServerUnavailableError,
    TimeoutValueError,
    TlsError,
    UnknownHostError,
)
from .explanation import Check, Explanation
from .options import RequestOptions, Tls
from .prepared import AsyncPreparedCall, PreparedCall
from .result import Result
from .stats import ClientStats

logging.getLogger("shm_backend_utils").addHandler(logging.NullHandler())  # quiet, unless the application listens

__all__ = [
    "Access",
    "AsyncPreparedCall",
    "AsyncShmClient",
    "Attached",
    "BudgetError",
    "CallerError",
    "Check",
    "ClientStats",
    "ClosedError",
    "ConnectionLostError",
    "CudaRegion",
    "DeadlineExceededError",
    "Explanation",
    "ForkedError",
    "InferenceError",
    "InputMissingError",
    "MachineError",
    "MissingTensorError",
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
    "TensorError",
    "TimeoutValueError",
    "Tls",
    "TlsError",
    "UnknownHostError",
    "attach",
]
