"""DeviceArray: what it is, its rows and shapes, what it tells other libraries, and what it takes over from them."""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable
from copy import copy as copy_of
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.errors import DeviceMemoryError, ModelError, TensorTypeError
from shm_backend_utils.gpu.arrays.copies import copy
from shm_backend_utils.gpu.arrays.device_array import DeviceArray, StridedArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.arrays.imported import imported, is_on_gpu
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType, TensorView
from shm_backend_utils.testing.fake_cuda.driver import Tensor
from tests.unit.gpu.arrays.capsules import content
from tests.unit.gpu.arrays.conftest import KERNEL_S, Array, Gpu, numbers
from tests.unit.gpu.fakes import DRIVER, MODEL, NOTHING, kernel, left_of

ADDRESS = 0x7F0000001000  # nothing is there: whoever reads it dies
DEVICE = 3
NO_CUDA: Any = None
HANDLE = bytes(range(HANDLE_LENGTH))
FP32 = np.dtype(np.float32)


def array_of(
    shape: tuple[int, ...] = (2, 3), dtype: np.dtype[Any] = FP32, *, owner: object = None, read_only: bool = False
) -> DeviceArray:
    return DeviceArray(NO_CUDA, ADDRESS, shape, dtype, DEVICE, owner, is_read_only=read_only)


def view_of(shape: tuple[int, ...] = (2, 3), *, read_only: bool = False, handle: bytes | None = HANDLE) -> DeviceView:
    return DeviceView("IMAGE", array_of(shape, read_only=read_only), dtypes.BY_NAME["FP32"], "direct", handle=handle)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("numpy", r"no attribute 'numpy'; use it with an array library, .*or .*\.to_host\(\)"),
        ("flavour", "^a DeviceArray has no attribute 'flavour'$"),
    ],
)
def test_an_attribute_that_other_libraries_have_is_refused_with_advice(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(array_of(), name)


@pytest.mark.parametrize("way", [pickle.dumps, copy_of, deepcopy, np.asarray])
def test_an_array_is_neither_pickled_nor_copied_to_the_host_unasked(way: Callable[[object], object]) -> None:
    why = "which NumPy cannot read" if way is np.asarray else "and cannot be pickled"
    with pytest.raises(TypeError, match=rf"memory of GPU 3, {why}; copy it by \.to_host\(\)"):
        way(array_of())


@pytest.mark.parametrize("name", ["BOOL", "BF16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)], ids=str)
def test_an_array_knows_its_elements(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtypes.BY_NAME[name]
    array, same = array_of(shape, dtype.numpy), np.empty(shape, dtype.numpy)
    assert (array.shape, array.dtype, array.size) == (same.shape, same.dtype, same.size)
    assert (array.ndim, array.nbytes) == (same.ndim, same.nbytes)
    if shape:
        assert len(array) == len(same)
    else:
        with pytest.raises(TypeError, match="without dimensions"):
            len(array)
    assert (array.address, array.device) == (ADDRESS, DEVICE)
    assert repr(array) == f"<DeviceArray {dtype.name} {list(shape)} GPU 3>"


@given(st.slices(5), st.sampled_from([(5,), (5, 3), (5, 0), (5, 2, 4)]))
def test_rows_are_numpys_rows(rows: slice, shape: tuple[int, ...]) -> None:
    same = np.empty(shape, FP32)
    if rows.step not in (None, 1):
        with pytest.raises(TypeError, match="indexed by rows"):
            array_of(shape)[rows]
        return
    whole = DeviceArray(NO_CUDA, ADDRESS, shape, FP32, DEVICE, None, is_read_only=True, written_on=77)
    part, wanted = whole[rows], same[rows]
    assert (part.shape, part.is_read_only, part.written_on, part.device) == (wanted.shape, True, 77, DEVICE)
    if wanted.size:
        assert part.address - ADDRESS == wanted.ctypes.data - same.ctypes.data


@pytest.mark.parametrize("index", [0, (0, 1), ..., None, slice(None, None, -1), "x"], ids=repr)
def test_other_indexes_are_left_to_array_libraries(index: Any) -> None:
    with pytest.raises(TypeError, match=r"shape \(2, 3\) is indexed by rows, array\[2:5\]; found .*torch.from_dlpack"):
        array_of()[index]
    with pytest.raises(TypeError, match="cannot be written by itself; use it with an array library"):
        array_of()[index] = 1  # type: ignore[index]


@given(st.sampled_from([(), (6,), (2, 3), (0, 3), (4, 3, 2)]), st.lists(st.integers(-1, 7), max_size=4))
def test_shapes_are_numpys_shapes(shape: tuple[int, ...], wanted: list[int]) -> None:
    try:
        expected = np.empty(shape, FP32).reshape(wanted).shape
    except ValueError:
        with pytest.raises(ValueError, match="cannot become one of shape"):
            array_of(shape).reshape(wanted)
        return
    found = array_of(shape).reshape(wanted)
    assert (found.shape, found.address) == (expected, ADDRESS)
    assert array_of(shape).reshape(*wanted).shape == expected


# DLPack


@pytest.mark.parametrize(
    "asked",
    [
        *({"stream": stream} for stream in (None, -1, 1, 2, 0x5000)),
        *({"dl_device": (2, DEVICE)}, {"copy": False}, {"dl_device": None, "copy": None}),
    ],
    ids=str,
)
def test_a_capsule_is_made_for_every_stream_and_nobody_waits_for_what_is_written(asked: dict[str, Any]) -> None:
    for value in (array_of(), view_of()):
        found = content(value.__dlpack__(**asked))  # without CUDA: a call of it would fail
        assert (found.data, found.device, found.shape) == (ADDRESS, (2, DEVICE), (2, 3))


NO_STREAM = "expected 1 .legacy default., 2 .per-thread default., .* -1 for no"
ANOTHER_DEVICE = r"is on device \(2, 3\), asked for was "


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        *(({"stream": stream}, NO_STREAM) for stream in (0, -2, True, 1.0, "1")),
        *(({"dl_device": device}, ANOTHER_DEVICE) for device in ((1, 0), (2, 0), (13, DEVICE))),
        ({"copy": True}, "never copies; copy the array that you make from it"),
    ],
    ids=str,
)
def test_a_capsule_of_something_else_is_refused(asked: dict[str, Any], text: str) -> None:
    for value in (array_of(), view_of()):
        with pytest.raises(BufferError, match=text):
            value.__dlpack__(**asked)


@pytest.mark.parametrize(("name", "typestr"), [("BF16", "<V2"), ("BOOL", "|b1"), ("FP32", "<f4")])
def test_the_interface_describes_the_memory(name: str, typestr: str) -> None:
    """PyTorch takes nothing that the interface calls read-only; so nothing is."""
    interface = array_of((2, 3), dtypes.BY_NAME[name].numpy, read_only=True).__cuda_array_interface__
    assert interface == {
        **{"shape": (2, 3), "typestr": typestr, "data": (ADDRESS, False)},
        **{"strides": None, "version": 3, "stream": None},
    }
    assert array_of((0, 3)).__cuda_array_interface__["data"] == (0, False)


def test_a_view_knows_its_tensor() -> None:
    dtype = dtypes.BF16
    view = DeviceView("IMAGE", array_of((2, 3), dtype.numpy), dtype, "direct")
    assert (view.array.address, view.writable, view_of(read_only=True).writable) == (ADDRESS, True, False)
    assert view.__cuda_array_interface__ == view.array.__cuda_array_interface__
    assert view.__dlpack_device__() == (2, DEVICE)
    assert (view.name, view.path, view.shape, view.device) == ("IMAGE", "direct", (2, 3), DEVICE)
    assert (view.dtype, view.triton_dtype) == (dtype.numpy, dtype.name)
    assert repr(view) == f"<DeviceView 'IMAGE' {dtype.name} [2, 3] GPU 3 path=direct>"


@pytest.mark.parametrize("handle", [HANDLE, None], ids=["the client's", "its own"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
def test_a_view_knows_where_its_bytes_lie_and_by_which_handle(shape: tuple[int, ...], handle: bytes | None) -> None:
    expected = BufferAttributes(MemoryType.GPU, DEVICE, 4 * math.prod(shape), handle)
    assert view_of(shape, handle=handle).attributes == expected


IN_HOST_MEMORY = TensorView("IMAGE", np.zeros(2, np.float32), dtypes.BY_NAME["FP32"], "triton")
TO_HOST = ("memory of GPU 3", "NumPy cannot read", ".cupy()", "call.to_host(view)")
TO_GPU = ("host memory", ".numpy()", "call.to_device(view)", "FORCE_CPU_ONLY_INPUT_TENSORS: no")


@pytest.mark.parametrize(
    ("convert", "view", "ways_out"),
    [
        (DeviceView.numpy, view_of(), TO_HOST),
        (np.asarray, view_of(), TO_HOST),
        (TensorView.cupy, IN_HOST_MEMORY, TO_GPU),
    ],
)
def test_what_a_view_cannot_be_names_the_ways_out(convert: Any, view: Any, ways_out: tuple[str, ...]) -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        convert(view)
    assert isinstance(caught.value, ModelError)
    assert [words for words in ("tensor 'IMAGE'", *ways_out) if words not in str(caught.value)] == []
    assert HANDLE.hex() not in str(caught.value)


class WithInterfaceAlone:
    """A tensor as Numba has it: with CUDA's array interface, and nothing else."""

    def __init__(self, tensor: Tensor, **changed: Any) -> None:
        self._tensor = tensor
        self._changed = changed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        tensor = copy_of(self._tensor)
        if tensor.dtype != dtypes.BF16.numpy:
            return {**tensor.__cuda_array_interface__, **self._changed}
        tensor.dtype = np.dtype(np.uint16)
        return {**tensor.__cuda_array_interface__, "typestr": "<V2"}  # as PyTorch has it


class WithoutVersions:
    """A tensor of a library that speaks the DLPack of before 2023.12."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None) -> object:
        return self._tensor.__dlpack__(stream=stream)


class WithGradients:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> object:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


PROTOCOLS = {"DLPack": lambda tensor: tensor, "older DLPack": WithoutVersions, "interface": WithInterfaceAlone}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=list(PROTOCOLS))


def late(gpu: Gpu, values: Array, stream: int) -> Tensor:
    tensor = DRIVER.tensor(np.zeros_like(values))
    with gpu.runtime.on(0):
        kernel(stream, lambda memory: np.copyto(memory, values), tensor, late_s=KERNEL_S)
    tensor.stream = stream
    return tensor


def read_back(gpu: Gpu, array: DeviceArray | StridedArray, stream: int) -> Array:
    found = np.zeros(array.shape, array.dtype)
    copy(gpu.runtime, found, array, stream)
    return found


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        *((name, shape, {}) for name, shape in (("BOOL", (2, 3)), ("BF16", ()), ("INT64", (0, 3)), ("FP32", (1,)))),
        *(("FP32", (20,), {"kind": kind}) for kind in ("pool", "managed", "vmm")),
    ],
    ids=str,
)
@every_protocol
def test_taken_where_it_is(gpu: Gpu, protocol: Any, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    dtype = dtypes.BY_NAME[name]
    values, stream = numbers(shape, dtype.numpy), gpu.stream(1)
    tensor = DRIVER.tensor(values, device=1, offset=512, **options)
    found = imported(gpu.runtime, protocol(tensor), stream)
    assert isinstance(found, DeviceArray)
    assert (found.shape, found.dtype, found.is_read_only) == (shape, dtype.numpy, False)
    if values.size:
        assert (found.address, found.device) == (tensor.address, 1)
    assert read_back(gpu, found, stream).tobytes() == values.tobytes()


def test_a_library_that_puts_no_bool_into_capsules_has_an_interface(gpu: Gpu) -> None:
    stream = gpu.stream()
    found = imported(gpu.runtime, DRIVER.tensor([True, False], capsule_bool=False), stream)
    assert found.dtype == np.bool_
    assert read_back(gpu, found, stream).tolist() == [True, False]


@every_protocol
def test_strided_memory_is_described_and_not_copied(gpu: Gpu, protocol: Any) -> None:
    values, stream = numbers((6, 5, 4)), gpu.stream()
    tensor = DRIVER.tensor(values)[1:, ::2, 1:3]
    found = imported(gpu.runtime, protocol(tensor), stream)
    assert isinstance(found, StridedArray)
    assert (found.address, found.strides) == (tensor.address, (80, 32, 4))
    np.testing.assert_array_equal(read_back(gpu, found, stream), values[1:, ::2, 1:3])


@pytest.mark.parametrize("key", [slice(1, 2), (slice(0, 1), slice(0, 3)), slice(2, 2)], ids=str)
@every_protocol
def test_what_is_contiguous_is_no_strided_array_whatever_strides_it_has(gpu: Gpu, protocol: Any, key: Any) -> None:
    tensor = DRIVER.tensor(numbers((6, 5)))[key]
    assert isinstance(imported(gpu.runtime, protocol(tensor), gpu.stream()), DeviceArray)


def test_arrays_and_views_of_ours_are_taken_as_they_are_and_what_is_read_only_says_so(gpu: Gpu) -> None:
    array, stream, tensor = gpu.array(numbers((4,))), gpu.stream(), DRIVER.tensor(numbers((4,)))
    assert imported(gpu.runtime, array, stream) is array
    assert imported(gpu.runtime, DeviceView("X", array, dtypes.BY_NAME["INT32"], "direct"), stream) is array
    assert imported(gpu.runtime, WithInterfaceAlone(tensor, data=(tensor.address, True)), stream).is_read_only


def test_a_tensor_that_takes_part_in_gradients_says_what_its_library_says(gpu: Gpu) -> None:
    with pytest.raises(TensorTypeError, match="tensor 'X' is a .*WithGradients on a GPU.*: .* use tensor.detach"):
        imported(gpu.runtime, WithGradients(), gpu.stream(), tensor="X")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"typestr": "<c8"}, "NumPy dtype complex64"),
        ({"typestr": ">i4"}, "NumPy dtype >i4"),
        ({"mask": 1}, "has a mask"),
    ],
    ids=["complex", "big-endian", "masked"],
)
def test_what_has_no_counterpart_is_refused(gpu: Gpu, changed: dict[str, Any], reason: str) -> None:
    value = WithInterfaceAlone(DRIVER.tensor(numbers((4,))), **changed)
    with pytest.raises(TensorTypeError, match=f"does not export its memory: .*{reason}"):
        imported(gpu.runtime, value, gpu.stream(), tensor="X")
    del value
    gc.collect()
    assert left_of(MODEL) == NOTHING


def test_what_is_on_a_gpu_is_known(gpu: Gpu) -> None:
    tensor = DRIVER.tensor(numbers((4,)))
    managed = DRIVER.tensor(numbers((4,)), kind="managed")
    for value in (tensor, managed, WithInterfaceAlone(tensor), gpu.array(numbers((4,)))):
        assert is_on_gpu(value)
    for other in (numbers((4,)), 5, None, [tensor]):
        assert not is_on_gpu(other)


@every_protocol
def test_memory_lives_as_long_as_what_was_taken(gpu: Gpu, protocol: Any) -> None:
    before = DRIVER.live().allocations
    stream = gpu.stream()
    found = imported(gpu.runtime, protocol(DRIVER.tensor(numbers((4, 5)))), stream)
    assert isinstance(found, DeviceArray)
    rows = found[1:].reshape(-1)
    del found
    gc.collect()
    assert read_back(gpu, rows, stream).tobytes() == numbers((4, 5))[1:].tobytes()
    assert DRIVER.live().allocations == before + 1
    del rows
    gc.collect()
    assert DRIVER.live().allocations == before


@pytest.mark.parametrize("number", [None, 0, 1, 2], ids=["its own", "0", "legacy", "the thread's"])
@every_protocol
def test_a_stream_waits_for_what_the_library_has_still_to_write(gpu: Gpu, protocol: Any, number: int | None) -> None:
    stream, values = gpu.stream(), numbers((1000,))
    found = imported(gpu.runtime, protocol(late(gpu, values, gpu.stream() if number is None else number)), stream)
    assert read_back(gpu, found, stream).tobytes() == values.tobytes()
