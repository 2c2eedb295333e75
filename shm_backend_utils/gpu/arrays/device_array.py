"""Elements on a GPU: DeviceArray is C-contiguous and serves any array library; StridedArray only describes them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...tensors import dlpack
from ...tensors.dlpack import c_strides
from ..ordering import OwnStreams, order_after
from ..runtime import LEGACY_STREAM, PER_THREAD_STREAM, CudaRuntime
from ..streams import NamedStream
from .capsules import CapsuleTensor, capsule_over
from .cupy_arrays import cupy_array, cupy_stream

__all__ = ["DeviceArray", "StridedArray", "viewed"]


_COMPUTES_NOTHING: Final = (
    "use it with an array library, for example torch.from_dlpack(array) or array.cupy(), or copy it by .to_host()"
)
_OF_LIBRARIES: Final = frozenset(
    {"T", "astype", "clone", "copy", "copy_", "cpu", "detach", "fill", "fill_", "get", "item", "mean", "numpy", "set"}
    | {"squeeze", "sum", "to", "tobytes", "tolist", "torch", "transpose", "view"}
)


class DeviceArray:
    """C-contiguous elements on a GPU, without a copy. It computes nothing: pass it to an array library.

    ``torch.from_dlpack(array)``, ``cupy.from_dlpack(array)``, ``jax.dlpack.from_dlpack(array)`` and
    ``numba.cuda.as_cuda_array(array)`` take it without a copy, and keep its memory.

    Parameters
    ----------
    runtime : CudaRuntime
    address : int
        Of the first element.
    shape : sequence of int
    dtype : numpy.dtype
        In :mod:`shm_backend_utils.dtypes`.
    device : int
        This process' number of the GPU.
    owner : object
        Keeps the memory. It lives as long as the array and everything made from it.
    is_read_only : bool, optional
        No known library respects it on GPUs.
    written_on : int, optional
        A stream of the same GPU that may still be writing the elements. Consumers of the array wait for it.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "device",
        "dtype",
        "is_read_only",
        "owner",
        "runtime",
        "shape",
        "written_on",
    )

    def __init__(
        self,
        runtime: CudaRuntime,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        device: int,
        owner: object,
        *,
        is_read_only: bool = False,
        written_on: int | None = None,
    ) -> None:
        self.runtime = runtime
        self.address = address
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.is_read_only = is_read_only
        self.written_on = written_on
        self.owner = owner

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes."""
        return c_strides(self.shape, self.dtype.itemsize)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    __iter__ = None  # else Python would iterate by length and index

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return rows, ``array[2:5]``, as an array over the same memory.

        Raises
        ------
        TypeError
            The index is not a slice of rows. Use an array library for others.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            raise TypeError(
                f"a DeviceArray of shape {self.shape} is indexed by rows, array[2:5]; found {rows!r}; for more, use an "
                "array library, for example torch.from_dlpack(array) or array.cupy()"
            )
        begin, end, _ = rows.indices(self.shape[0])
        row_size = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows_shape = max(end - begin, 0), *self.shape[1:]
        return viewed(self, address=self.address + begin * row_size, shape=rows_shape)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the same elements in another shape.

        Parameters
        ----------
        *shape : int, or one sequence of int
            One size may be -1: it follows from the number of elements.

        Returns
        -------
        DeviceArray
            Over the same memory, which it keeps.

        Raises
        ------
        ValueError
            The shape has another number of elements.
        """
        wanted = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
        sizes = [operator.index(size) for size in wanted]
        if -1 in sizes:
            rest = -math.prod(sizes)
            if sizes.count(-1) > 1 or rest <= 0 or self.size % rest:
                self._refuse_shape(sizes)
            sizes[sizes.index(-1)] = self.size // rest
        if min(sizes, default=0) < 0 or math.prod(sizes) != self.size:
            self._refuse_shape(sizes)
        return viewed(self, shape=tuple(sizes))

    def let_wait(self, stream: int, device: int) -> None:
        """Make a stream of any device wait until the elements are written. The host does not wait.

        Parameters
        ----------
        stream : int
            A ``CUstream`` or ``cudaStream_t``, as a number.
        device : int
            The stream's GPU, by this process' number.

        Raises
        ------
        MachineError
            The stream does not exist.
        """
        if self.written_on is not None and stream != self.written_on:
            written_on = NamedStream(self.written_on, self.device)
            order_after(OwnStreams(self.runtime), (written_on,), device, stream)

    def cupy(self) -> Any:
        """Return a CuPy array over this memory; CuPy's current stream waits until the elements are written.

        Returns
        -------
        cupy.ndarray
            Of the same shape and dtype. BF16 comes as ``uint16`` with a CuPy older than 14, or without the package
            ``ml_dtypes``. The array keeps the memory.

        Raises
        ------
        MachineError
            CuPy is not installed.
        """
        with self.runtime.on(self.device):
            if self.written_on is not None:
                self.let_wait(cupy_stream(self.device), self.device)
            return cupy_array(self.address, self.shape, self.dtype, self.device, self)

    def to_host(self) -> npt.NDArray[Any]:
        """Return a copy in host memory. It waits for all work that this process has launched on the GPU before.

        It ends no graph capture. Work on a stream that is being captured is not part of it.

        Returns
        -------
        numpy.ndarray
            Writable, with its own memory, of the same shape and dtype.

        Raises
        ------
        MachineError
            Earlier work on the GPU has failed.
        """
        copied = np.empty(self.shape, self.dtype)
        with self.runtime.on(self.device):
            self.runtime.wait_beside_captures(self.device)
            if copied.nbytes:
                # The per-thread default stream exists already, and waits for no stream but the legacy default stream.
                self.runtime.copy(copied.ctypes.data, self.address, copied.nbytes, PER_THREAD_STREAM)
                self.runtime.synchronize_stream(PER_THREAD_STREAM, self.device)
        return copied

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule over this memory, by the rules of the array API standard (2023.12).

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, which waits until the elements are written. 1 or None is the legacy default stream,
            2 the per-thread default stream, a larger number a ``cudaStream_t``. With -1, no stream waits.
        max_version, dl_device, copy
            As in the standard.

        Raises
        ------
        BufferError
            The consumer asks for a copy, for another device, or for a stream that CUDA does not have.
        """
        here = self.__dlpack_device__()
        if dl_device not in (None, here):
            raise BufferError(
                f"the array is on device {here}, asked for was {dl_device}; .to_host() copies it to the host"
            )
        if copy:
            raise BufferError("a DeviceArray never copies; copy the array that you make from it")
        if stream is None:
            stream = LEGACY_STREAM
        if type(stream) is not int or stream < -1 or stream == 0:
            raise BufferError(
                f"stream {stream!r} is not a CUDA stream; expected 1 (legacy default), 2 (per-thread default), a "
                "cudaStream_t above 2, or -1 for no synchronization"
            )
        if stream > 0:
            self.let_wait(stream, self.device)
        tensor = CapsuleTensor(
            self.address, self.shape, self.strides, self.dtype, dlpack.CUDA, self.device, self.is_read_only
        )
        return capsule_over(tensor, self, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface of the memory, version 3. BF16 has the type ``<V2``, as in PyTorch and CuPy.

        Reading it waits until the elements are written, because PyTorch ignores the interface's stream. It never says
        read-only, because PyTorch refuses read-only memory.
        """
        if self.written_on is not None:
            self.runtime.synchronize_stream(self.written_on, self.device)
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype == dtypes.BF16.numpy else self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Raise TypeError: NumPy cannot read a GPU's memory."""
        raise TypeError(f"the array is in memory of GPU {self.device}, which NumPy cannot read; copy it by .to_host()")

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a pickle cannot carry a GPU's memory."""
        raise TypeError(f"the array is in memory of GPU {self.device}, and cannot be pickled; copy it by .to_host()")

    if not TYPE_CHECKING:  # type checkers do not see these two methods, and so report their uses as errors

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with advice if other libraries' arrays have this attribute."""
            raise AttributeError(
                f"a DeviceArray has no attribute {name!r}{'; ' + _COMPUTES_NOTHING if name in _OF_LIBRARIES else ''}",
                name=name,
                obj=self,
            )

        def __setitem__(self, rows: object, value: object) -> NoReturn:
            """Raise TypeError: only array libraries can write to it."""
            raise TypeError(f"a DeviceArray cannot be written by itself; {_COMPUTES_NOTHING}")

    def __repr__(self) -> str:
        return f"<DeviceArray {dtypes.BY_NUMPY[self.dtype].name} {list(self.shape)} GPU {self.device}>"

    def _refuse_shape(self, shape: Sequence[int]) -> NoReturn:
        raise ValueError(f"an array of shape {self.shape} cannot become one of shape {tuple(shape)}")


def viewed(
    array: DeviceArray,
    *,
    address: int | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
    is_read_only: bool | None = None,
) -> DeviceArray:
    """Return an array over the same memory, or a part of it, with these attributes changed; it keeps the memory."""
    return DeviceArray(
        array.runtime,
        array.address if address is None else address,
        array.shape if shape is None else shape,
        array.dtype if dtype is None else dtype,
        array.device,
        array.owner,
        is_read_only=array.is_read_only if is_read_only is None else is_read_only,
        written_on=array.written_on,
    )


@dataclass(frozen=True, eq=False)
class StridedArray:
    """Elements on a GPU with any strides, from another library's array."""

    runtime: CudaRuntime
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; may be 0 or negative
    dtype: np.dtype[Any]
    device: int  # this process' number of the GPU
    owner: object  # keeps the memory
    is_read_only: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes, without the gaps between them."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<StridedArray {self.dtype} {list(self.shape)} strides {list(self.strides)} GPU {self.device}>"
