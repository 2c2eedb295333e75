"""Views: one tensor's memory, for any array library, with attributes as in ``TRITONSERVER_BufferAttributes``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import DeviceMemoryError, TensorTypeError
from . import dlpack
from .strings import Strings

__all__ = ["DIRECT", "TRITON", "BufferAttributes", "MemoryType", "NoArray", "StringsView", "TensorView"]

_NO_ARRAY: Final[npt.NDArray[Any]] = np.empty(0, object)


class MemoryType(IntEnum):
    """The kinds of memory of ``TRITONSERVER_MemoryType``, with its numbers (``tritonserver.h``)."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


@dataclass(frozen=True, slots=True)
class BufferAttributes:
    """The attributes of one tensor's buffer.

    Attributes
    ----------
    memory_type : MemoryType
        The kind of memory.
    memory_type_id : int
        The CUDA device of GPU memory; 0 for CPU memory.
    byte_size : int
        The tensor's size in bytes.
    cuda_ipc_handle : bytes or None
        The 64 bytes of ``cudaIpcMemHandle_t`` through which the memory was opened; None for other memory.
    """

    memory_type: MemoryType
    memory_type_id: int
    byte_size: int
    cuda_ipc_handle: bytes | None = None


class NoArray:
    """The base of views: if code uses a view as an array, the error says how to make an array of the view."""

    __slots__ = ()

    name: str

    def _as_array(self) -> str:
        """Return the expressions that make an array of the view."""
        return "np.asarray(view), or torch.from_dlpack(view), or another library's"

    if not TYPE_CHECKING:  # type checkers must not see these methods

        def __getattr__(self, attribute: str) -> Any:
            if attribute == "name" or attribute.startswith("__"):  # the view is not made yet, or a protocol asks
                raise AttributeError(attribute)
            raise AttributeError(
                f"this {type(self).__name__} has no attribute {attribute!r}; make an array of tensor {self.name!r} "
                f"first: {self._as_array()}"
            )

        def _no_operand(self, *_: object) -> NoReturn:
            raise TypeError(
                f"this {type(self).__name__} supports neither arithmetic nor indexing; make an array of tensor "
                f"{self.name!r} first: {self._as_array()}"
            )

        __getitem__ = __setitem__ = __iter__ = _no_operand
        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _no_operand
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _no_operand
        __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _no_operand


DIRECT: Final = "direct"
"""The path of a tensor in the memory that its client shares."""

TRITON: Final = "triton"
"""The path of a tensor that Triton delivers, be it from its own shared memory or from the request."""


class TensorView(NoArray):
    """A view of a tensor in its memory, never a copy.

    The view and every array made from it keep the memory mapped, even after the call. But after the call, the memory
    serves the client's next request: read and write it only inside the call.

    Attributes
    ----------
    name : str
    shape : tuple of int
        With the batch dimension, where the model has one.
    dtype : numpy.dtype
        The elements' NumPy type.
    path : str
        ``"direct"``: this is the client's own memory. ``"triton"``: Triton delivered the tensor, or will deliver it.
    """

    __slots__ = ("_array", "_dtype", "_memory_type", "dtype", "name", "path", "shape")

    def __init__(
        self, name: str, array: Any, dtype: DType, path: str, memory_type: MemoryType = MemoryType.CPU
    ) -> None:
        self.name = name
        self.path = path
        self._array = array
        self._dtype = dtype
        self._memory_type = memory_type
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = dtype.numpy

    @property
    def array(self) -> Any:
        """The tensor as an array: NumPy's in host memory, a :class:`.DeviceArray` on a GPU."""
        return self._array

    @property
    def triton_dtype(self) -> str:
        """Triton's name of the elements' type, for example ``"FP32"``."""
        return self._dtype.name

    @property
    def writable(self) -> bool:
        """Whether arrays made from this view may be written to. Inputs may not."""
        return bool(self._array.flags.writeable)

    @property
    def attributes(self) -> BufferAttributes:
        """The place and the number of the tensor's bytes."""
        return BufferAttributes(self._memory_type, 0, self._array.nbytes)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the tensor as a C-contiguous array over this very memory; read-only if the view is."""
        array: npt.NDArray[Any] = self._array.view()
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return :meth:`numpy`, copied if ``dtype`` or ``copy`` need it; ValueError if ``copy=False`` forbids that."""
        array = self.numpy()
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        if copy is False and wanted != array.dtype:
            raise ValueError(f"tensor {self.name!r} is {array.dtype}, which cannot become {wanted} without a copy")
        return array.astype(wanted, copy=bool(copy))

    def strings(self) -> Strings:
        """Raise TensorTypeError: only a :class:`StringsView` has strings."""
        raise TensorTypeError(self.name, f"tensor {self.name!r} holds {self.triton_dtype}, no strings; use .numpy()")

    def cupy(self) -> Any:
        """Raise DeviceMemoryError: only a :class:`.DeviceView` is on a GPU, and a view never copies to one."""
        raise DeviceMemoryError(
            f"tensor {self.name!r} is in host memory; use .numpy() for a view, or call.to_device(view) for a copy. "
            "Triton itself brings tensors of plain clients to the host, unless config.pbtxt has the parameter "
            "FORCE_CPU_ONLY_INPUT_TENSORS: no"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCPU, 0)``."""
        return dlpack.CPU_DEVICE

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule over this very memory, by the rules of the array API standard (2023.12).

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, for a tensor on a GPU: 1 or None for the legacy default stream, 2 for the per-thread
            one, larger for a ``cudaStream_t``; -1 for no synchronization. See :meth:`.DeviceArray.__dlpack__`.
        max_version, dl_device, copy
            As the standard says.

        Raises
        ------
        BufferError
            The consumer asks for a copy, for another device, or for a stream that the device does not have. Or it asks
            for an unversioned capsule, which cannot be read-only, and the view is read-only and of host memory. Before
            NumPy 2.1, a consumer that asks for a versioned capsule gets an unversioned one.
        """
        here = self.__dlpack_device__()
        if dl_device not in (None, here):
            raise BufferError(f"tensor {self.name!r} is on device {here}, asked for was {dl_device}")
        if copy:
            raise BufferError(f"a view of tensor {self.name!r} never copies; copy the array that you make from it")
        return self._capsule(stream, max_version)

    def __repr__(self) -> str:
        return f"<TensorView {self.name!r} {self.triton_dtype} {list(self.shape)} path={self.path}>"

    def _capsule(self, stream: object, max_version: tuple[int, int] | None) -> Any:
        if stream is not None:
            raise BufferError(f"tensor {self.name!r} is in CPU memory, which has no stream; pass stream=None")
        try:
            return dlpack.export(self._array, max_version)
        except BufferError:
            raise BufferError(
                f"tensor {self.name!r} is read-only, which an unversioned DLPack capsule cannot express; ask for "
                "max_version=(1, 0), or use .numpy()"
            ) from None


class StringsView(TensorView):
    """A view of a tensor of strings."""

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
        """Always False. To write strings, use ``call.put(name, strings)``."""
        return False

    @property
    def attributes(self) -> BufferAttributes:
        """The place and the number of the tensor's bytes, lengths included; room for more may follow them."""
        return BufferAttributes(self._memory_type, 0, self._strings.encoded.nbytes)

    def strings(self) -> Strings:
        """Return the elements. If a length leads beyond the tensor, reading the first element raises TensorError."""
        return self._strings.afresh()

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements as an array of ``bytes`` objects, which is always a copy."""
        return self.strings().numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return :meth:`numpy`; ValueError for ``copy=False``."""
        if copy is False:
            raise ValueError(f"tensor {self.name!r} holds strings, which can become an array only by a copy")
        return super().__array__(dtype)

    def __dlpack__(self, **_: Any) -> Any:
        """Raise BufferError: DLPack has no strings."""
        raise BufferError(f"tensor {self.name!r} holds strings, which DLPack has no type for; use .strings()")
