"""CuPy arrays over memory that CuPy does not own."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ... import dtypes
from ...errors import MachineError
from ..runtime import LEGACY_STREAM

__all__ = ["cupy_array", "cupy_stream"]

_KNOWS_BF16: Final = 14
"""The first CuPy version that knows the BF16 of ``ml_dtypes``."""


def cupy_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object) -> Any:
    """Return a C-contiguous CuPy array; BF16 comes as ``uint16`` with an older CuPy or without ``ml_dtypes``.

    It is made from the address, because CuPy 13 takes no BF16 by DLPack, and CuPy 14 only with some NumPy versions.
    MachineError if CuPy is not installed.
    """
    cupy = _imported()
    if dtype == dtypes.BF16.numpy and (dtype.type is np.void or int(cupy.__version__.partition(".")[0]) < _KNOWS_BF16):
        dtype = np.dtype(np.uint16)
    byte_size = math.prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, byte_size, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def cupy_stream(device: int) -> int:
    """Return CuPy's current stream of a device in this thread; raises as :func:`cupy_array`."""
    return int(_imported().cuda.get_current_stream(device).ptr) or LEGACY_STREAM


def _imported() -> Any:
    try:
        import cupy  # noqa: PLC0415  # large, so only on request
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise MachineError(f"CuPy cannot be imported, because {error.name} is missing; install it") from error
        raise MachineError(
            "a CuPy array was requested, but CuPy is not installed; install cupy-cuda12x or cupy-cuda13x, or use "
            "another library, for example torch.from_dlpack"
        ) from None
    except ImportError as error:
        reason = error.__cause__ or error
        raise MachineError(
            f"CuPy is installed, but cannot be imported: {reason}; install the CuPy for this machine's CUDA"
        ) from error
    return cupy
