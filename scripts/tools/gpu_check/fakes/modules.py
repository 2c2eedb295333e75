"""Modules that stand for CuPy and PyTorch where the driver is a fake, with arrays and kernels that are NumPy's."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import LEGACY_STREAM, CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver


class FakeStream:
    """A stream as CuPy and PyTorch have them: the current one of its thread for a ``with`` block."""

    def __init__(self, library: FakeLibrary, device: int) -> None:
        self._library = library
        self.device_id = device
        self.ptr = self.cuda_stream = library.runtime.create_stream(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol, and the CUstream."""
        return 0, self.ptr

    def __enter__(self) -> FakeStream:
        self._library.streams.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.streams.pop()


class FakeLibrary:
    """What an array library has: streams, memory and kernels."""

    def __init__(self, driver: FakeDriver) -> None:
        self.runtime = CudaRuntime()
        self._driver = driver
        self._thread = threading.local()

    @property
    def streams(self) -> list[int]:
        """The streams that are current in this thread, the innermost last."""
        found: list[int] = vars(self._thread).setdefault("streams", [LEGACY_STREAM])
        return found

    def empty(self, kind: type[FakeArray], count: int, dtype: npt.DTypeLike, device: int) -> FakeArray:
        """Return an array in memory of its own."""
        block = CudaAllocation(self.runtime, count * np.dtype(dtype).itemsize, device)
        return self.over(kind, block.address, (count,), np.dtype(dtype), device, block.keeper)

    def over(
        self,
        kind: type[FakeArray],
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        owner: object,
    ) -> FakeArray:
        """Return an array over memory."""
        byte_size = int(np.prod(shape)) * dtype.itemsize
        content = memoryview((ctypes.c_ubyte * byte_size).from_address(address))  # nothing here ever reads it
        return kind(self, np.frombuffer(content, np.uint8).view(dtype).reshape(shape), device, owner)

    def taken(self, kind: type[FakeArray], value: Any) -> FakeArray:
        """Return another library's array as one of this, by DLPack; the current stream waits for it."""
        found = imported(self.runtime, _ByDlpack(value), self.streams[-1])
        return self.over(kind, found.address, tuple(found.shape), found.dtype, found.device, found)

    def launch(self, kernel: Callable[..., None], *arrays: FakeArray) -> None:
        """Put a function of NumPy arrays on the current stream."""
        device = arrays[-1].device
        with self.runtime.on(device):
            self._driver.launch(self.streams[-1], lambda: kernel(*[each.content(self._driver) for each in arrays]))


class FakeArray:
    """An array on the fake driver, strided as NumPy's are."""

    def __init__(self, library: FakeLibrary, shadow: npt.NDArray[Any], device: int, owner: object) -> None:
        self._library = library
        self._shadow = shadow
        self._owner = owner
        self.device = device
        self.shape = shadow.shape
        self.dtype = shadow.dtype

    def content(self, driver: FakeDriver) -> npt.NDArray[Any]:
        """Return the memory itself, for a kernel."""
        shadow = self._shadow
        extent = sum((size - 1) * stride for size, stride in zip(shadow.shape, shadow.strides, strict=True))
        memory = driver.memory(shadow.ctypes.data, (extent + shadow.itemsize,), np.uint8)
        content: npt.NDArray[Any] = np.ndarray(shadow.shape, shadow.dtype, memory.data, 0, shadow.strides)
        return content

    def __getitem__(self, index: Any) -> FakeArray:
        return type(self)(self._library, self._shadow[index], self.device, self._owner)

    def __setitem__(self, index: Any, values: FakeArray) -> None:
        self[index].copy_(values)

    def copy_(self, values: FakeArray) -> None:
        """Copy another array to this one, on the current stream."""
        self._library.launch(lambda source, target: np.copyto(target, source), values, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        return 2, self.device

    def __dlpack__(self, **wanted: Any) -> Any:
        """Return a capsule over this memory; the consumer's stream waits for this library's current one."""
        described = DeviceArray(
            self._library.runtime,
            self._shadow.ctypes.data,
            self.shape,
            self.dtype,
            self.device,
            self,
            written_on=self._library.streams[-1],
        )
        return described.__dlpack__(**wanted)


class _ByDlpack:
    """A value as the array of a stranger, which has DLPack and nothing else."""

    def __init__(self, value: Any) -> None:
        self.__dlpack__ = value.__dlpack__
        self.__dlpack_device__ = value.__dlpack_device__


def install_fakes() -> None:
    """Load the fake driver into this process, and let it import ``cupy`` and ``torch`` that work on it."""
    library = FakeLibrary(FakeDriver.load())
    torch = _torch(library)
    sys.modules["cupy"] = _module("cupy", vars(_Cupy(library)))
    sys.modules["torch"] = torch
    sys.modules["torch.utils"] = torch.utils
    sys.modules["torch.utils.dlpack"] = torch.utils.dlpack


class _CupyArray(FakeArray):
    __module__ = "cupy"  # by which the library knows whose it is


class _TorchTensor(FakeArray):
    __module__ = "torch"


class _Cupy:
    """Its attributes are the module's."""

    def __init__(self, library: FakeLibrary) -> None:
        self.__version__ = "14.0, a fake"
        self._library = library
        self._device = 0
        self.multiply: Any = lambda x, factor, out: self._compute(np.multiply, x, factor, out)
        self.add: Any = lambda x, number, out: self._compute(np.add, x, number, out)
        self.ndarray: Any = self._over
        self.empty: Any = lambda count, dtype: library.empty(_CupyArray, count, dtype, self._device)
        self.ElementwiseKernel: Any = self._elementwise
        self.cuda = SimpleNamespace(
            Device=self._current,
            Stream=lambda non_blocking: FakeStream(library, self._device),
            get_current_stream=lambda device: SimpleNamespace(ptr=library.streams[-1]),
            UnownedMemory=lambda address, byte_size, owner, device: (address, owner, device),
            MemoryPointer=lambda memory, offset: memory,
        )

    def _over(self, shape: tuple[int, ...], dtype: Any, memory: tuple[int, object, int]) -> FakeArray:
        address, owner, device = memory
        return self._library.over(_CupyArray, address, shape, np.dtype(dtype), device, owner)

    def _compute(self, function: Callable[..., Any], x: FakeArray, number: float, out: FakeArray) -> None:
        self._library.launch(lambda numbers, result: function(numbers, number, out=result), x, out)

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[None]:
        former, self._device = self._device, device
        try:
            yield
        finally:
            self._device = former

    def _elementwise(self, inputs: str, output: str, operation: str, name: str) -> Callable[..., None]:
        """Return a function that launches an operation on an array and some numbers, by NumPy and in its precision."""
        types, names = zip(*[parameter.split() for parameter in inputs.split(",")], strict=True)
        target, _, expression = operation.partition(" = ")
        assert output.split()[1] == target
        code = compile(expression, name, "eval")

        def launch(x: FakeArray, *numbers: Any) -> None:
            *scalars, y = numbers
            constants = [np.dtype(kind).type(number) for kind, number in zip(types[1:], scalars, strict=True)]

            def run(values: npt.NDArray[Any], result: npt.NDArray[Any]) -> None:
                result[...] = eval(code, dict(zip(names, [values, *constants], strict=True)))

            self._library.launch(run, x, y)

        return launch


def _torch(library: FakeLibrary) -> Any:
    def compute(function: Callable[..., Any]) -> Callable[..., None]:
        def launch(x: FakeArray, number: float, out: FakeArray) -> None:
            library.launch(lambda numbers, result: function(numbers, number, out=result), x, out)

        return launch

    def from_dlpack(value: Any) -> FakeArray:
        return library.taken(_TorchTensor, value)

    def empty(count: int, dtype: Any, device: str) -> FakeArray:
        return library.empty(_TorchTensor, count, dtype, int(device.partition(":")[2]))

    cuda = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda device: FakeStream(library, device),
        stream=lambda stream: stream,
    )
    utils = _module("torch.utils", {"dlpack": _module("torch.utils.dlpack", {"from_dlpack": from_dlpack})})
    return _module(
        "torch",
        {
            "__version__": "none: a fake",
            "backends": SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True)),
            "bool": np.bool_,
            "cuda": cuda,
            "empty": empty,
            "float32": np.float32,
            "from_dlpack": from_dlpack,
            "add": compute(np.add),
            "mul": compute(np.multiply),
            "utils": utils,
        },
    )


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # who asks whether it is installed looks at that
    vars(made).update(content)
    return made
