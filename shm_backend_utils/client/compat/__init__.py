"""Other libraries' clients, on this library's memory."""

from __future__ import annotations

from .triton_shm_client import InferShmError, OptionError, TritonSHMClient

__all__ = ["InferShmError", "OptionError", "TritonSHMClient"]
