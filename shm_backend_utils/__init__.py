"""Triton Python models that read and write the client's memory, without copies.

Two halves, which never import each other:

- :mod:`shm_backend_utils.model`, for ``model.py``: numpy and the standard library alone.
- :mod:`shm_backend_utils.client`, for applications: needs ``tritonclient``.

The public names of both can be imported from here; nothing is loaded before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import AsyncShmClient, ShmClient
    from .errors import ShmError
    from .model import ShmSession
    from .tensors.attributes import BufferAttributes, MemoryType
    from .tensors.view import TensorView

__version__: Final = "0.1.0"

_HOMES: Final = {
    "AsyncShmClient": "client",
    "BufferAttributes": "tensors.attributes",
    "MemoryType": "tensors.attributes",
    "ShmClient": "client",
    "ShmError": "errors",
    "ShmSession": "model",
    "TensorView": "tensors.view",
}

__all__ = [
    "AsyncShmClient",
    "BufferAttributes",
    "MemoryType",
    "ShmClient",
    "ShmError",
    "ShmSession",
    "TensorView",
    "__version__",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
