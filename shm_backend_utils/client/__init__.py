"""The half that applications import. It needs ``tritonclient`` (``pip install triton-shm-backend-utils[client]``)."""

from __future__ import annotations

from ..region.system import Access
from .call import PreparedCall
from .client import ShmClient
from .errors import DeadlineExceededError, InferenceError, ServerUnavailableError
from .result import Result

__all__ = [
    "Access",
    "DeadlineExceededError",
    "InferenceError",
    "PreparedCall",
    "Result",
    "ServerUnavailableError",
    "ShmClient",
]
