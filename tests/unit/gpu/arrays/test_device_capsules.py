"""Capsules over GPU memory: what they say, and who owns them; what PyTorch and CuPy, as they are, make of arrays."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.arrays.capsules import CapsuleTensor, capsule_over, taken_over
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.libraries import as_library, library_of
from shm_backend_utils.tensors.dlpack import NUMPY_MAKES_VERSIONED, c_strides
from tests.unit.gpu.arrays.capsules import Content, content, name_of, onto_device, version_and_flags

NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 0, 2), (2, 3, 4)]
ADDRESS = 0x7F0000001000  # nothing is there: whoever reads it dies
CUDA, MANAGED = 2, 13

FP32 = dtypes.BY_NAME["FP32"]
every_tensor = pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, (2, 3)) for dtype in NUMBERS), *((FP32, shape) for shape in SHAPES)],
    ids=lambda value: value.name if isinstance(value, DType) else str(value),
)
both_kinds = pytest.mark.parametrize("version", [None, (1, 0)], ids=str)


class Owner:
    """Keeps nothing; tests look whether it lives."""


def on_gpu(
    dtype: DType = FP32, shape: tuple[int, ...] = (2, 3), address: int = ADDRESS, *, read_only: bool = False
) -> CapsuleTensor:
    return CapsuleTensor(address, shape, c_strides(shape, dtype.itemsize), dtype.numpy, CUDA, 3, read_only)


# What is made


@both_kinds
@every_tensor
def test_a_capsule_describes_memory(dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None) -> None:
    for address in (ADDRESS, ADDRESS + 1, 0):
        memory = on_gpu(dtype, shape, address)
        found = content(capsule_over(memory, Owner(), version))
        data_type = (dtype.dlpack_code, dtype.dlpack_bits, 1)
        assert found._replace(strides=None) == Content(address, (CUDA, 3), data_type, shape, None, 0)
        assert found.strides in (None, tuple(stride // dtype.itemsize for stride in memory.strides))


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 0)], ids=str)
def test_a_consumer_gets_a_version_that_it_knows(version: tuple[int, int] | None) -> None:
    is_versioned = NUMPY_MAKES_VERSIONED and version is not None and version >= (1, 0)
    capsule = capsule_over(on_gpu(), Owner(), version)
    assert name_of(capsule) == (b"dltensor_versioned" if is_versioned else b"dltensor")
    if is_versioned:
        assert version_and_flags(capsule) == (1, 0, 0)


@both_kinds
@pytest.mark.parametrize("is_consumed", [False, True])
def test_a_capsule_or_its_consumer_keeps_the_owner(version: tuple[int, int] | None, is_consumed: bool) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    kept: list[object] = [capsule_over(on_gpu(), owner, version)]
    if is_consumed:
        kept = [taken_over(kept.pop()).owner]
    del owner
    gc.collect()
    assert alive() is not None
    kept.clear()
    assert alive() is None


# What is taken over


@both_kinds
@every_tensor
def test_what_is_made_is_taken_over(dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None) -> None:
    memory = on_gpu(dtype, shape, read_only=True)
    capsule = capsule_over(memory, Owner(), version)
    is_versioned = name_of(capsule) == b"dltensor_versioned"
    found, _ = taken_over(capsule)
    address = ADDRESS if 0 not in shape else 0
    assert found == memory._replace(address=address, is_read_only=is_versioned)
    assert name_of(capsule) == (b"used_dltensor_versioned" if is_versioned else b"used_dltensor")


def test_what_is_no_unused_capsule_is_refused() -> None:
    used = capsule_over(on_gpu(), Owner(), None)
    taken_over(used)
    for value in (used, None, b"dltensor"):
        with pytest.raises(TypeError, match="expected an unused DLPack capsule"):
            taken_over(value)


@pytest.mark.parametrize(
    ("array", "device_type", "text"),
    [
        (np.zeros(3), 1, "expected memory of a GPU .device type 2 or 13., found device type 1"),
        (np.zeros(2, np.complex64), CUDA, "has no counterpart in Triton"),
    ],
)
def test_what_is_not_taken_over_stays_the_capsules(array: Any, device_type: int, text: str) -> None:
    capsule = onto_device(array.__dlpack__(), device_type)
    with pytest.raises(TypeError, match=text):
        taken_over(capsule)
    assert name_of(capsule) == b"dltensor"


# PyTorch: its tensors and capsules, as if the host's memory were a GPU's


@both_kinds
@every_tensor
def test_what_pytorch_gives_away_is_read(dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype.name.lower().replace("fp", "float").replace("bf", "bfloat"))
    tensor = torch.zeros(shape, dtype=kind)
    memory, _ = taken_over(onto_device(tensor.__dlpack__(max_version=version), CUDA, 1))
    assert (memory.dtype, memory.shape, memory.device_type, memory.device) == (dtype.numpy, shape, CUDA, 1)
    assert memory.address == (tensor.data_ptr() if tensor.numel() else 0)


every_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])


def without_cuda() -> Any:
    return SimpleNamespace(on=lambda _: nullcontext())


def array_of(
    dtype: DType, shape: tuple[int, ...] = (2, 3), address: int = ADDRESS, owner: object = None
) -> DeviceArray:
    return DeviceArray(without_cuda(), address, shape, dtype.numpy, 0, owner)


class OnTheHost(DeviceArray):
    """An array in host memory that is asked as one of a GPU, and gives away capsules of the host."""

    asked: dict[str, Any]

    def __dlpack__(self, **asked: Any) -> Any:
        self.asked = asked
        return onto_device(super().__dlpack__(**asked), 1)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0x7000))
    return torch


@every_dtype
def test_pytorch_takes_arrays_of_every_type(torch: Any, dtype: DType) -> None:
    host = np.arange(6 * dtype.itemsize, dtype=np.uint8) % 2
    array = OnTheHost(without_cuda(), host.ctypes.data, (2, 3), dtype.numpy, 0, host)
    tensor = as_library(array, "torch")
    assert array.asked == {"max_version": (1, 0), "stream": 0x7000}
    assert (tensor.data_ptr(), tuple(tensor.shape)) == (host.ctypes.data, (2, 3))
    assert tensor.view(torch.uint8).numpy().tobytes() == host.tobytes()


def test_pytorch_names_stream_1_and_keeps_the_owner(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    host, owner = np.zeros(6, np.float32), Owner()
    alive = weakref.ref(owner)
    array = OnTheHost(without_cuda(), host.ctypes.data, (6,), host.dtype, 0, owner)
    tensor = as_library(array, "torch")[2:]
    assert library_of(tensor) == library_of(torch.nn.Parameter(tensor)) == "torch"
    assert array.asked["stream"] == 1
    del owner, array
    gc.collect()
    assert alive() is not None
    del tensor
    assert alive() is None


def test_a_pytorch_that_knows_no_bool_takes_it_as_bytes(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host = np.array([True, False, True])
    take = torch.utils.dlpack.from_dlpack

    def older(array: Any) -> Any:
        if content(array.__dlpack__()).data_type[0] == 6:
            raise RuntimeError("Unsupported code 6")
        return take(onto_device(array.__dlpack__(), 1))

    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", older)
    tensor = as_library(array_of(dtypes.BY_NAME["BOOL"], (3,), host.ctypes.data, host), "torch")
    assert (tensor.dtype, tensor.tolist(), tensor.data_ptr()) == (torch.bool, [True, False, True], host.ctypes.data)


# CuPy


@every_dtype
def test_cupy_takes_arrays_of_every_type(dtype: DType) -> None:
    cupy = pytest.importorskip("cupy")
    taken = as_library(array_of(dtype), "cupy")
    assert isinstance(taken, cupy.ndarray)
    assert (taken.data.ptr, taken.shape, taken.data.device_id) == (ADDRESS, (2, 3), 0)
    assert taken.flags.c_contiguous
    is_known = dtype is not dtypes.BF16 or (dtype.numpy.type is not np.void and int(cupy.__version__[:2]) >= 14)
    assert taken.dtype == (dtype.numpy if is_known else np.uint16)


def test_cupy_has_the_names_that_are_used() -> None:
    cupy = pytest.importorskip("cupy")
    assert cupy.cuda.UnownedMemory.__doc__.startswith(
        "UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)"
    )
    assert cupy.cuda.get_current_stream.__doc__.startswith("get_current_stream(int device_id=-1)")
    assert isinstance(cupy.cuda.Stream.null.ptr, int)
    assert library_of(cupy.ndarray((0,), memptr=cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)))


@pytest.mark.parametrize(("version", "is_known"), [("13.6.0", False), ("14.0.0", True), ("14.2.0", True)])
def test_bf16_is_what_the_version_of_cupy_knows(monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool) -> None:
    pytest.importorskip("ml_dtypes")
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy, "__version__", version)
    assert array_of(dtypes.BF16).cupy().dtype == (dtypes.BF16.numpy if is_known else np.uint16)


def test_without_cupy_an_array_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MachineError, match="install cupy-cuda12x or cupy-cuda13x, or use another library"):
        array_of(dtypes.BF16).cupy()


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("jaxlib._jax", "jax"),
        ("jaxlib.xla_extension", "jax"),
        ("numba.cuda.cudadrv.devicearray", "numba"),
        ("cupy", "cupy"),
        ("torch", "torch"),
        ("numpy", None),
        ("torchvision.tv_tensors", None),
    ],
)
def test_a_library_is_known_by_where_its_type_is_from(module: str, library: str | None) -> None:
    made = type("Array", (), {"__module__": module})
    assert library_of(array_of(dtypes.BF16)) is None
    assert library_of(made()) == library
    assert library_of(type("Derived", (made,), {"__module__": "users_own"})()) == library


@pytest.mark.parametrize(
    ("library", "module", "function", "name", "typestr"),
    [
        ("jax", "dlpack", "from_dlpack", "BF16", "<V2"),
        ("numba", "cuda", "as_cuda_array", "FP32", "<f4"),
        ("numba", "cuda", "as_cuda_array", "BF16", "<u2"),
    ],
)
def test_jax_takes_an_array_itself_and_numba_bf16_as_integers(
    monkeypatch: pytest.MonkeyPatch, library: str, module: str, function: str, name: str, typestr: str
) -> None:
    taking = SimpleNamespace(**{function: lambda array: array})
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(**{module: taking}))
    interface = as_library(array_of(dtypes.BY_NAME[name]), library).__cuda_array_interface__
    assert (interface["data"], interface["typestr"]) == ((ADDRESS, False), typestr)


def test_a_library_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'tensorflow'; expected one of 'torch', 'cupy', 'jax', 'numba'"):
        as_library(array_of(dtypes.BF16), "tensorflow")


WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from shm_backend_utils import dtypes
from tests.unit.gpu.arrays.capsules import content
from tests.unit.gpu.arrays.test_device_capsules import array_of
assert dtypes.BF16.numpy == np.dtype("V2")
del sys.modules["ml_dtypes"]  # CuPy looks there, and stumbles over None
array = array_of(dtypes.BF16)
assert content(array.__dlpack__()).data_type == (4, 16, 1)  # which PyTorch knows
assert array.__cuda_array_interface__["typestr"] == "<V2"
assert array.cupy().dtype == np.uint16
"""


def test_bf16_goes_to_pytorch_and_cupy_without_ml_dtypes() -> None:
    pytest.importorskip("cupy")
    subprocess.run([sys.executable, "-c", WITHOUT_ML_DTYPES], check=True, timeout=100)
