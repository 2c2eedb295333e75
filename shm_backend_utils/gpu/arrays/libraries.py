"""The array library that a value belongs to, and arrays of these libraries over GPU memory.

PyTorch and JAX take the memory by DLPack, Numba by CUDA's array interface, and CuPy from the address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ... import dtypes
from .device_array import DeviceArray, viewed

__all__ = ["as_library", "library_of"]

_MODULES: Final = {"torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax", "numba": "numba"}
_BYTES: Final = np.dtype(np.uint8)
_WORDS: Final = np.dtype(np.uint16)


def library_of(value: Any) -> str | None:
    """Return the array library of a value: ``"torch"``, ``"cupy"``, ``"jax"`` or ``"numba"``; None for others.

    A user's subclass belongs to the library of its base class.
    """
    for each in type(value).__mro__:
        found = _MODULES.get(each.__module__.partition(".")[0])
        if found is not None:
            return found
    return None


def as_library(array: DeviceArray, library: str) -> Any:
    """Return an array of a library, by its name from :func:`library_of`, over a DeviceArray's memory, which it keeps.

    The library's stream waits until the elements are written. BF16 comes as ``uint16`` in Numba, and sometimes in CuPy:
    see :meth:`.DeviceArray.cupy`. ImportError if the library is not installed; ValueError if it is unknown.
    """
    make = _MAKERS.get(library)
    if make is None:
        raise ValueError(f"unknown array library {library!r}; expected one of {', '.join(map(repr, _MAKERS))}")
    with array.runtime.on(array.device):
        return make(array)


def _torch(array: DeviceArray) -> Any:
    import torch  # noqa: PLC0415  # large, so only on request
    from torch.utils.dlpack import from_dlpack  # noqa: PLC0415

    if array.dtype != np.bool_:
        return from_dlpack(array)
    try:
        return from_dlpack(array)
    except RuntimeError:  # some versions do not support bool in DLPack
        return from_dlpack(viewed(array, dtype=_BYTES)).view(torch.bool)


def _jax(array: DeviceArray) -> Any:
    from jax import dlpack  # noqa: PLC0415

    return dlpack.from_dlpack(array)


def _numba(array: DeviceArray) -> Any:
    from numba import cuda  # noqa: PLC0415

    return cuda.as_cuda_array(viewed(array, dtype=_WORDS) if array.dtype == dtypes.BF16.numpy else array)


_MAKERS: Final[dict[str, Callable[[DeviceArray], Any]]] = {
    "torch": _torch,
    "cupy": DeviceArray.cupy,
    "jax": _jax,
    "numba": _numba,
}
