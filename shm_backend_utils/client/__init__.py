"""The half that applications import. It needs ``tritonclient`` (``pip install 'CHECKOUT_OR_WHEEL[client]'``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .extra import name_missing_library

with name_missing_library():
    import tritonclient.utils  # noqa: F401

from .. import errors as shared_errors
from ..errors import CallerError, ClosedError, MachineError, NoSharedMemoryError, PeerError, ShmError, TensorError
from ..memory.descriptors import Access
from ..memory.pool.options import PoolOptions
from ..moved import moved
from . import errors as client_errors
from .aio import AsyncShmClient
from .client import ShmClient
from .errors import (
    BudgetError,
    ConnectionLostError,
    DeadlineExceededError,
    ForkedError,
    InferenceError,
    PathUnavailableError,
    PoolExhaustedError,
    ServerUnavailableError,
)
from .inputs.sources import InputDescription
from .known_model import CopyWarning
from .options import RequestOptions, Tls
from .prepared import PreparedCall
from .result import Result

logging.getLogger("shm_backend_utils").addHandler(logging.NullHandler())  # quiet, unless the application listens

__all__ = [
    "Access",
    "AsyncShmClient",
    "BudgetError",
    "CallerError",
    "ClosedError",
    "ConnectionLostError",
    "CopyWarning",
    "DeadlineExceededError",
    "ForkedError",
    "InferenceError",
    "InputDescription",
    "MachineError",
    "NoSharedMemoryError",
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
    "TensorError",
    "Tls",
]

if TYPE_CHECKING:
    from ..compat.attach import *  # noqa: F403
else:
    __getattr__ = moved(
        __name__,
        {
            **dict.fromkeys(("Attached", "CudaRegion", "attach"), "compat.attach"),
            **dict.fromkeys(("Check", "ClientStats", "Explanation"), "client.explanation"),
            **dict.fromkeys(shared_errors.__all__, "errors"),
            **dict.fromkeys(client_errors.__all__, "client.errors"),
            "AsyncPreparedCall": "client.prepared",
            "CudaError": "gpu.errors",
            "DeviceArray": "gpu.arrays.device_array",
        },
    )


def __dir__() -> list[str]:
    return __all__
