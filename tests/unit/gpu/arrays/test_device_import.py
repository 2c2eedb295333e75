"""Arrays of any library on a GPU, taken over where they lie: what they are, who keeps them, and who waits for whom."""

from __future__ import annotations

import gc
from copy import copy as copy_of
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import TensorTypeError
from shm_backend_utils.gpu.arrays.copies import copy
from shm_backend_utils.gpu.arrays.device_array import DeviceArray, StridedArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.arrays.imported import imported, is_on_gpu
from shm_backend_utils.testing.fake_cuda.driver import Tensor
from tests.unit.gpu.arrays.conftest import KERNEL_S, Array, Gpu, numbers
from tests.unit.gpu.fakes import DRIVER, MODEL, NOTHING, kernel, left_of


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
    """Return a tensor that a kernel has still to write, and whose library knows that."""
    tensor = DRIVER.tensor(np.zeros_like(values))
    with gpu.runtime.on(0):
        kernel(stream, lambda memory: np.copyto(memory, values), tensor, late_s=KERNEL_S)
    tensor.stream = stream
    return tensor


def content(gpu: Gpu, array: DeviceArray | StridedArray, stream: int) -> Array:
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
def test_every_array_is_taken_where_it_lies(
    gpu: Gpu, protocol: Any, name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    dtype = dtypes.BY_NAME[name]
    values, stream = numbers(shape, dtype.numpy), gpu.stream(1)
    tensor = DRIVER.tensor(values, device=1, offset=512, **options)
    found = imported(gpu.runtime, protocol(tensor), stream)
    assert isinstance(found, DeviceArray)
    assert (found.shape, found.dtype, found.is_read_only) == (shape, dtype.numpy, False)
    if values.size:
        assert (found.address, found.device) == (tensor.address, 1)
    assert content(gpu, found, stream).tobytes() == values.tobytes()


def test_a_library_that_puts_no_bool_into_capsules_has_an_interface(gpu: Gpu) -> None:
    stream = gpu.stream()
    found = imported(gpu.runtime, DRIVER.tensor([True, False], capsule_bool=False), stream)
    assert found.dtype == np.bool_
    assert content(gpu, found, stream).tolist() == [True, False]


@every_protocol
def test_strided_memory_is_described_and_not_copied(gpu: Gpu, protocol: Any) -> None:
    values, stream = numbers((6, 5, 4)), gpu.stream()
    tensor = DRIVER.tensor(values)[1:, ::2, 1:3]
    found = imported(gpu.runtime, protocol(tensor), stream)
    assert isinstance(found, StridedArray)
    assert (found.address, found.strides) == (tensor.address, (80, 32, 4))
    np.testing.assert_array_equal(content(gpu, found, stream), values[1:, ::2, 1:3])


@pytest.mark.parametrize("key", [slice(1, 2), (slice(0, 1), slice(0, 3)), slice(2, 2)], ids=str)
@every_protocol
def test_what_is_contiguous_is_no_strided_array_whatever_strides_it_has(gpu: Gpu, protocol: Any, key: Any) -> None:
    tensor = DRIVER.tensor(numbers((6, 5)))[key]
    assert isinstance(imported(gpu.runtime, protocol(tensor), gpu.stream()), DeviceArray)


def test_arrays_and_views_of_ours_are_taken_as_they_are(gpu: Gpu) -> None:
    array, stream = gpu.array(numbers((4,))), gpu.stream()
    assert imported(gpu.runtime, array, stream) is array
    assert imported(gpu.runtime, DeviceView("X", array, dtypes.BY_NAME["INT32"], "direct"), stream) is array


def test_what_is_read_only_says_so(gpu: Gpu) -> None:
    tensor = DRIVER.tensor(numbers((4,)))
    read_only = WithInterfaceAlone(tensor, data=(tensor.address, True))
    assert imported(gpu.runtime, read_only, gpu.stream()).is_read_only


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
    with pytest.raises(TensorTypeError, match=f"does not give its memory away: .*{reason}"):
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
    assert content(gpu, rows, stream).tobytes() == numbers((4, 5))[1:].tobytes()
    assert DRIVER.live().allocations == before + 1
    del rows
    gc.collect()
    assert DRIVER.live().allocations == before


@pytest.mark.parametrize("number", [None, 0, 1, 2], ids=["its own", "0", "legacy", "the thread's"])
@every_protocol
def test_a_stream_waits_for_what_the_library_has_still_to_write(gpu: Gpu, protocol: Any, number: int | None) -> None:
    stream, values = gpu.stream(), numbers((1000,))
    found = imported(gpu.runtime, protocol(late(gpu, values, gpu.stream() if number is None else number)), stream)
    assert content(gpu, found, stream).tobytes() == values.tobytes()
