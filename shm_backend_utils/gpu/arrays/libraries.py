"""Which array library a value is of, and arrays of these libraries over memory on a GPU.

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
    """Return which array library a value is of: ``"torch"``, ``"cupy"``, ``"jax"``, ``"numba"``; None for others.

    A user's subclass of a library's arrays is of that library.
    """
    for each in type(value).__mro__:
        found = _MODULES.get(each.__module__.partition(".")[0])
        if found is not None:
            return found
    return None


def as_library(array: DeviceArray, library: str) -> Any:
    """Return an array of a library, as :func:`library_of` names it, over the memory of a DeviceArray, which it keeps.

    The library's stream waits for it. BF16 is ``uint16`` where the library has no such type: in Numba, and see
    :meth:`.DeviceArray.cupy`. ImportError if the library is not installed; ValueError if it is none of these.
    """
    make = _MAKERS.get(library)
    if make is None:
        raise ValueError(f"no array library {library!r} is known; expected one of {', '.join(map(repr, _MAKERS))}")
    with array.runtime.on(array.device):
        return make(array)


def _torch(array: DeviceArray) -> Any:
    import torch  # noqa: PLC0415  # large, and only where it is asked for
    from torch.utils.dlpack import from_dlpack  # noqa: PLC0415

    if array.dtype != np.bool_:
        return from_dlpack(array)
    try:
        return from_dlpack(array)
    except RuntimeError:  # some versions know no bool here
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
