"""Tensors of an invented array library, on the fake driver, as a user of torch, CuPy or JAX would pass them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...tensors.dlpack import CUDA, CUDA_MANAGED, NUMPY_MAKES_VERSIONED, VERSION, ForeignMemory, tensor_in

if TYPE_CHECKING:
    from .driver import FakeDriver

__all__ = ["Kind", "Tensor", "new_tensor"]

Kind = Literal["device", "pool", "managed", "vmm"]

_LEGACY_STREAM: Final = 1


class Memory:
    """Memory of a device, freed with the last tensor over it."""

    def __init__(self, driver: FakeDriver, kind: Kind, device: int, process: int, byte_size: int) -> None:
        bindings = driver.bindings(process)
        with bindings.context(device):
            self.address, give_back = _ALLOCATORS[kind](bindings, byte_size, device)
        self.driver, self.kind, self.device, self.process, self.byte_size = driver, kind, device, process, byte_size

        def free() -> None:
            with bindings.context(device):
                give_back()

        self.free = weakref.finalize(self, free)
        self.free.atexit = False


class Tensor:
    """A tensor on the fake driver. A slice shares its memory."""

    def __init__(
        self,
        memory: Memory,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stream: int | None = None,
        exports_bool: bool = True,
    ) -> None:
        self.memory, self.address, self.shape, self.strides, self.dtype = memory, address, shape, strides, dtype
        self.stream, self.exports_bool = stream, exports_bool

    @property
    def device(self) -> int:
        """The number of its GPU."""
        return self.memory.device

    @property
    def nbytes(self) -> int:
        """The number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def get(self) -> npt.NDArray[Any]:
        """Return a copy on the host, after all work on its stream; without a stream, at once."""
        if self.stream is not None:
            bindings = self.memory.driver.bindings(self.memory.process)
            with bindings.context(self.device):
                bindings.cuStreamSynchronize(self.stream)
        return np.array(self.peek(), order="C")

    def peek(self) -> npt.NDArray[Any]:
        """Return the memory as it is now, whatever is on streams, as a writable view. It must not be kept."""
        return _peek(self.memory.driver, self.address, self.shape, self.strides, self.dtype)

    def write(self, values: npt.ArrayLike, stream: int) -> None:
        """Write all elements on a stream, with its delay."""
        driver, place = self.memory.driver, (self.address, self.shape, self.strides, self.dtype)
        content = np.array(values, self.dtype)

        def kernel() -> None:  # keeps no memory alive, like a GPU's kernel
            _peek(driver, *place)[...] = content

        with driver.bindings(self.memory.process).context(self.device):
            driver.launch(stream, kernel, self.memory.process)
        self.stream = stream

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Tensor:
        """Return a view: integers, slices with positive steps, None and ``...``."""
        strides = tuple(0 if 0 in self.shape else stride for stride in self.strides)
        like = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), self.shape, strides, writeable=False)
        view = like[
            key if isinstance(key, tuple) and ... in key else (*(key if isinstance(key, tuple) else (key,)), ...)
        ]
        address = self.address + (view.ctypes.data - like.ctypes.data)
        kinds = {"stream": self.stream, "exports_bool": self.exports_bool}
        return type(self)(self.memory, address, view.shape, view.strides, self.dtype, **kinds)  # type: ignore[arg-type]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3; AttributeError for BF16, which it does not know."""
        if self.dtype == dtypes.BF16.numpy:
            raise AttributeError("BF16 has no __cuda_array_interface__")
        interface: dict[str, Any] = {"version": 3, "shape": self.shape, "typestr": self.dtype.str}
        interface |= {"data": (self.address, False), "strides": None if self._is_contiguous() else self.strides}
        if self.stream is not None:
            interface["stream"] = self.stream or _LEGACY_STREAM
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device type (managed memory has its own) and the device's number."""
        return (CUDA_MANAGED if self.memory.kind == "managed" else CUDA), self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule. The consumer's stream waits for the stream that writes this tensor."""
        if copy or dl_device not in {None, self.__dlpack_device__()}:
            raise BufferError("this tensor is lent where it is, and not copied")
        if self.dtype == np.bool_ and not self.exports_bool:
            raise BufferError("this library does not put bool into capsules")
        if stream != -1 and self.stream is not None:
            self._order(_LEGACY_STREAM if stream is None else stream)
        is_bf16 = self.dtype == dtypes.BF16.numpy
        interface = {"shape": self.shape, "strides": self.strides, "data": (self.address, False)}
        lent = np.asarray(ForeignMemory(self, {**interface, "typestr": "<u2" if is_bf16 else self.dtype.str}))
        is_versioned = NUMPY_MAKES_VERSIONED and max_version is not None and max_version >= VERSION
        capsule: object = lent.__dlpack__(max_version=VERSION) if is_versioned else lent.__dlpack__()
        found = tensor_in(capsule)
        found.device.device_type, found.device.device_id = self.__dlpack_device__()
        if is_bf16:
            found.dtype.code = dtypes.BF16.dlpack_code
        return capsule

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {list(self.shape)} fake device {self.device} at {self.address:#x}>"

    def _is_contiguous(self) -> bool:
        step = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return 0 in self.shape
            step *= length
        return True

    def _order(self, consumer: int) -> None:
        bindings = self.memory.driver.bindings(self.memory.process)
        with bindings.context(self.device):
            _, event = bindings.cuEventCreate(2)
            bindings.cuEventRecord(event, self.stream)
            bindings.cuStreamWaitEvent(consumer, event, 0)
            bindings.cuEventDestroy(event)


def new_tensor(
    driver: FakeDriver,
    values: npt.ArrayLike,
    *,
    device: int = 0,
    kind: Kind = "device",
    stream: int | None = None,
    process: int = 0,
    offset: int = 0,
    capsule_bool: bool = True,
) -> Tensor:
    """Return a tensor with these values, ``offset`` bytes into its allocation; a stream, if given, writes late."""
    content = np.array(values, order="C")
    memory = Memory(driver, kind, device, process, offset + max(content.nbytes, 1))
    address = memory.address + offset
    tensor = Tensor(memory, address, content.shape, content.strides, content.dtype, exports_bool=capsule_bool)
    if stream is None:
        tensor.peek()[...] = content
    else:
        tensor.write(content, stream)
    return tensor


def _peek(
    driver: FakeDriver, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    content = driver.memory(address, (extent,), np.uint8)
    seen: npt.NDArray[Any] = np.ndarray(shape, dtype, content.data, 0, strides)
    return seen


_Allocated = tuple[int, Callable[[], object]]


def _done(result: tuple[Any, ...]) -> Any:
    error, *found = result
    if error:
        raise MemoryError(f"a tensor on the fake driver: {error.name}")
    return found[0] if found else None


def _on_device(bindings: Any, byte_size: int, _: int) -> _Allocated:
    address = _done(bindings.cuMemAlloc(byte_size))
    return int(address), lambda: bindings.cuMemFree(address)


def _in_pool(bindings: Any, byte_size: int, _: int) -> _Allocated:
    address = _done(bindings.cuMemAllocAsync(byte_size, 0))
    return int(address), lambda: bindings.cuMemFreeAsync(address, 0)


def _managed(bindings: Any, byte_size: int, _: int) -> _Allocated:
    address = _done(bindings.cuMemAllocManaged(byte_size, 1))
    return int(address), lambda: bindings.cuMemFree(address)


def _virtual(bindings: Any, byte_size: int, device: int) -> _Allocated:
    plan = bindings.CUmemAllocationProp()
    plan.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    plan.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    plan.location.id = device
    unit = _done(bindings.cuMemGetAllocationGranularity(plan, 0))
    size = -(-byte_size // unit) * unit
    address = _done(bindings.cuMemAddressReserve(size, 0, 0, 0))
    handle = _done(bindings.cuMemCreate(size, plan, 0))
    _done(bindings.cuMemMap(address, size, 0, handle, 0))
    _done(bindings.cuMemRelease(handle))  # the mapping keeps it
    access = bindings.CUmemAccessDesc()
    access.location.type = plan.location.type
    access.location.id = device
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _done(bindings.cuMemSetAccess(address, size, [access], 1))

    def give_back() -> None:
        bindings.cuMemUnmap(address, size)
        bindings.cuMemAddressFree(address, size)

    return int(address), give_back


_ALLOCATORS: Final[dict[str, Callable[[Any, int, int], _Allocated]]] = {
    "device": _on_device,
    "pool": _in_pool,
    "managed": _managed,
    "vmm": _virtual,
}
