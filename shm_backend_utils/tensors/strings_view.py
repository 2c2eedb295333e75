"""StringsView: a tensor of strings. It has no array of its own kind in memory: reading it decodes, which copies."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .attributes import BufferAttributes, MemoryType
from .strings import Strings
from .view import TensorView

__all__ = ["StringsView"]

_NO_ARRAY: Final[npt.NDArray[Any]] = np.empty(0, object)


class StringsView(TensorView):
    """A tensor of strings, where it lies."""

    __slots__ = ("_strings",)

    def __init__(self, name: str, strings: Strings, path: str, memory_type: MemoryType = MemoryType.CPU) -> None:
        super().__init__(name, _NO_ARRAY, dtypes.BYTES, path, memory_type)
        self._strings = strings
        self.shape = strings.shape

    def _as_array(self) -> str:
        return "view.strings() or view.numpy()"

    @property
    def array(self) -> Any:
        """The same as :meth:`numpy`."""
        return self.numpy()

    @property
    def writable(self) -> bool:
        """Whether it may be written to: never. Strings are put: ``call.put(name, strings)``."""
        return False

    @property
    def attributes(self) -> BufferAttributes:
        """Where the bytes lie, and how many they are, lengths included; there may be room for more behind them."""
        return BufferAttributes(self._memory_type, 0, self._strings.encoded.nbytes)

    def strings(self) -> Strings:
        """Return the elements. Lengths that lead beyond the tensor are a TensorError when the first one is read."""
        return self._strings.afresh()

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements as an array of ``bytes`` objects, which is always a copy."""
        return self.strings().numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return :meth:`numpy`; ValueError if there must be no copy."""
        if copy is False:
            raise ValueError(f"tensor {self.name!r} holds strings, which become an array by a copy alone")
        return super().__array__(dtype)

    def __dlpack__(self, **_: Any) -> Any:
        """Raise BufferError: DLPack has no strings."""
        raise BufferError(f"tensor {self.name!r} holds strings, which DLPack has no type for; use .strings()")
