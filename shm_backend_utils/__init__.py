"""Triton Python models that read and write the client's memory, without copies.

Two halves, which never import each other:

- :mod:`shm_backend_utils.model`, for ``model.py``: numpy and the standard library alone.
- :mod:`shm_backend_utils.client`, for applications: needs ``tritonclient``.

You can import the names that most users need from here, and the errors that both halves share from
:mod:`shm_backend_utils.errors`. A module is loaded only when you use one of its names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import Access, AsyncShmClient, PoolOptions, PreparedCall, RequestOptions, Result, ShmClient, Tls
    from .errors import CallerError, ClosedError, MachineError, ModelError, PeerError, ShmError, TensorError
    from .model import BatchCall, BufferAttributes, Call, MemoryType, SequencePart, ShmSession, StreamCall, TensorView

__version__: Final = "0.2.0"

__all__ = [
    "Access",
    "AsyncShmClient",
    "BatchCall",
    "BufferAttributes",
    "Call",
    "CallerError",
    "ClosedError",
    "MachineError",
    "MemoryType",
    "ModelError",
    "PeerError",
    "PoolOptions",
    "PreparedCall",
    "RequestOptions",
    "Result",
    "SequencePart",
    "ShmClient",
    "ShmError",
    "ShmSession",
    "StreamCall",
    "TensorError",
    "TensorView",
    "Tls",
    "__version__",
]

_HOMES: Final = {
    "errors": ("CallerError", "ClosedError", "MachineError", "ModelError", "PeerError", "ShmError", "TensorError"),
    "model": (
        *("BatchCall", "BufferAttributes", "Call", "MemoryType"),
        *("SequencePart", "ShmSession", "StreamCall", "TensorView"),
    ),
}
"""The modules of all names that are not of the client half."""

_MOVED: Final = {
    **dict.fromkeys(("Check", "ClientStats", "Explanation"), "client.explanation"),
    "AsyncPreparedCall": "client.prepared",
    "DeviceArray": "gpu.arrays.device_array",
    "DeviceView": "gpu.arrays.device_view",
    "StringsView": "tensors.view",
}

if not TYPE_CHECKING:  # with a __getattr__, a type checker accepts every name, even a misspelt one, as Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            return import_module(f"{__name__}.moved").moved(__name__, _MOVED)(name, stacklevel=3)
        home = next((home for home, names in _HOMES.items() if name in names), "client")
        return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
