"""Modules that stand for CuPy and PyTorch where the driver is a fake, with arrays and kernels that are NumPy's."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import LEGACY_STREAM, CudaRuntime
from shm_backend_utils.tensors.dlpack import VERSION, c_strides
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from shm_backend_utils.testing.fake_cuda.tensor import Tensor


class FakeStream:
    """A stream as CuPy and PyTorch have them: the current one of its thread for a ``with`` block."""

    def __init__(self, library: FakeLibrary, device: int) -> None:
        self._library = library
        self.ptr = self.cuda_stream = library.runtime.create_stream(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> FakeStream:
        self._library.streams.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.streams.pop()


class FakeLibrary:
    def __init__(self, runtime: CudaRuntime) -> None:
        self.driver = FakeDriver.load()
        self.runtime = runtime
        self._thread = threading.local()

    @property
    def streams(self) -> list[int]:
        """The streams that are current in this thread, the innermost last."""
        found: list[int] = vars(self._thread).setdefault("streams", [LEGACY_STREAM])
        return found

    def empty(self, kind: type[_Array], count: int, dtype: npt.DTypeLike, device: int) -> _Array:
        block = CudaAllocation(self.runtime, count * np.dtype(dtype).itemsize, device)
        return self.over(kind, block.address, (count,), np.dtype(dtype), device, block.keeper)

    def over(
        self, kind: type[_Array], address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> _Array:
        memory: Any = SimpleNamespace(
            driver=self.driver, kind="device", device=device, process=0, library=self, owner=owner
        )
        return kind(memory, address, shape, c_strides(shape, dtype.itemsize), dtype)

    def from_dlpack(self, value: Any) -> _Array:
        """Return another library's array as a tensor of PyTorch's; the current stream waits for it."""
        stream = self.streams[-1]
        found = imported(self.runtime, value.__dlpack__(stream=stream, max_version=VERSION), stream)
        return self.over(_TorchTensor, found.address, tuple(found.shape), found.dtype, found.device, found)

    def launch(self, kernel: Callable[..., object], *arrays: _Array) -> None:
        with self.runtime.on(arrays[-1].device):
            self.driver.launch(self.streams[-1], lambda: kernel(*[each.peek() for each in arrays]))

    def multiply(self, x: _Array, number: float, out: _Array) -> None:
        self.launch(lambda numbers, result: np.multiply(numbers, number, out=result), x, out)

    def elementwise(self, inputs: str, output: str, operation: str, name: str) -> Callable[..., None]:
        """Return a function that launches an operation on an array and FP32 numbers, by NumPy."""
        names = [parameter.split()[1] for parameter in inputs.split(",")]
        target, _, expression = operation.partition(" = ")
        assert output.split()[1] == target
        code = compile(expression, name, "eval")

        def launch(x: _Array, *more: Any) -> None:
            *numbers, y = more

            def run(values: npt.NDArray[Any], result: npt.NDArray[Any]) -> None:
                result[...] = eval(code, dict(zip(names, [values, *map(np.float32, numbers)], strict=True)))

            self.launch(run, x, y)

        return launch


class _Array(Tensor):
    """A tensor that is exported as what its library's current stream has still to write."""

    def __setitem__(self, index: Any, values: _Array) -> None:
        assert index is ...
        self.copy_(values)

    def copy_(self, values: _Array) -> None:
        self._library.launch(lambda source, target: np.copyto(target, source), values, self)

    def __dlpack__(self, **wanted: Any) -> object:
        self.stream = self._library.streams[-1]
        return super().__dlpack__(**wanted)

    @property
    def _library(self) -> FakeLibrary:
        library: FakeLibrary = vars(self.memory)["library"]
        return library


class _CupyArray(_Array):
    __module__ = "cupy"  # by which the package knows whose it is


class _TorchTensor(_Array):
    __module__ = "torch"


def install_fakes(runtime: CudaRuntime) -> None:
    """Let this process, which has loaded the fake driver, import ``cupy`` and ``torch`` that work on it."""
    library = FakeLibrary(runtime)
    _module("cupy", **_cupy(library))
    from_dlpack = library.from_dlpack
    utils = _module("torch.utils", dlpack=_module("torch.utils.dlpack", from_dlpack=from_dlpack))
    _module(
        "torch",
        __version__="none: a fake",
        backends=SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True)),
        bool=np.bool_,
        cuda=SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda device: FakeStream(library, device),
            stream=lambda stream: stream,
        ),
        empty=lambda count, dtype, device: library.empty(_TorchTensor, count, dtype, int(device.partition(":")[2])),
        float32=np.float32,
        from_dlpack=from_dlpack,
        mul=library.multiply,
        utils=utils,
    )


def _cupy(library: FakeLibrary) -> dict[str, Any]:
    devices = [0]  # those that are current, the innermost last

    @contextlib.contextmanager
    def current(device: int) -> Iterator[None]:
        devices.append(device)
        try:
            yield
        finally:
            devices.pop()

    def over(shape: tuple[int, ...], dtype: Any, memory: tuple[int, object, int]) -> _Array:
        address, owner, device = memory
        return library.over(_CupyArray, address, shape, np.dtype(dtype), device, owner)

    return {
        "__version__": "14.0, a fake",
        "multiply": library.multiply,
        "ndarray": over,
        "empty": lambda count, dtype: library.empty(_CupyArray, count, dtype, devices[-1]),
        "ElementwiseKernel": library.elementwise,
        "cuda": SimpleNamespace(
            Device=current,
            Stream=lambda non_blocking: FakeStream(library, devices[-1]),
            get_current_stream=lambda device: SimpleNamespace(ptr=library.streams[-1]),
            UnownedMemory=lambda address, byte_size, owner, device: (address, owner, device),
            MemoryPointer=lambda memory, offset: memory,
        ),
    }


def _module(name: str, **content: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # who asks whether it is installed looks at that
    vars(made).update(content)
    return made
