"""Modules that stand for CuPy and PyTorch where the driver is a fake: as much of them as is used here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

from .arrays import FakeArray, FakeLibrary, FakeStream

__all__ = ["install_fakes"]


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
