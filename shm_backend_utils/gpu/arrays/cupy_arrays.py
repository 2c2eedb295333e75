"""Arrays of CuPy over memory that is not CuPy's."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ... import dtypes
from ...errors import MachineError
from ..runtime import LEGACY_STREAM

__all__ = ["cupy_array", "cupy_stream"]

_KNOWS_BF16: Final = 14
"""The first version of CuPy that knows the BF16 of ``ml_dtypes``."""


def cupy_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object) -> Any:
    """Return a C-contiguous array of CuPy; of BF16, where CuPy or ``ml_dtypes`` does not know it, as ``uint16``.

    It is made from the address, as CuPy 13 takes no BF16 by DLPack, and 14 only with some versions of NumPy.
    MachineError if CuPy is not installed.
    """
    cupy = _imported()
    if dtype == dtypes.BF16.numpy and (dtype.type is np.void or int(cupy.__version__.partition(".")[0]) < _KNOWS_BF16):
        dtype = np.dtype(np.uint16)
    byte_size = math.prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, byte_size, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def cupy_stream(device: int) -> int:
    """Return CuPy's current stream of a device, in this thread; raises as :func:`cupy_array`."""
    return int(_imported().cuda.get_current_stream(device).ptr) or LEGACY_STREAM


def _imported() -> Any:
    try:
        import cupy  # noqa: PLC0415  # large, and only where it is asked for
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise MachineError(f"CuPy cannot be imported, as it lacks {error.name}; install that") from error
        raise MachineError(
            "an array of CuPy was asked for, which is not installed; install cupy-cuda12x or cupy-cuda13x, or take the "
            "memory with another library, for example by torch.from_dlpack"
        ) from None
    except ImportError as error:
        reason = error.__cause__ or error
        raise MachineError(
            f"CuPy is installed, but cannot be imported: {reason}; it must be the CuPy for this machine's CUDA"
        ) from error
    return cupy
