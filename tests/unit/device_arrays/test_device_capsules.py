"""Capsules over GPU memory: what they say, who owns them, and what is taken over from others."""

from __future__ import annotations

import gc
import operator
import sys
import weakref

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.tensors.cuda.capsules import CapsuleTensor, capsule_over, taken_over
from shm_backend_utils.tensors.dlpack_structures import NUMPY_MAKES_VERSIONED, c_strides
from tests.unit.device_arrays.capsules import Content, content, name_of, onto_device, version_and_flags

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


def elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(stride // itemsize for stride in strides)


# What is made


@both_kinds
@every_tensor
def test_a_capsule_says_place_type_and_shape(
    dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None
) -> None:
    memory = on_gpu(dtype, shape)
    found = content(capsule_over(memory, Owner(), version))
    data_type = (dtype.dlpack_code, dtype.dlpack_bits, 1)
    assert found._replace(strides=None) == Content(ADDRESS, (CUDA, 3), data_type, shape, None, 0)
    assert found.strides in (None, elements(memory.strides, dtype.itemsize))


@pytest.mark.parametrize(("shape", "address"), [((0, 3), 0), ((2, 3), ADDRESS + 1)], ids=["no elements", "odd"])
def test_an_address_may_be_none_or_at_any_byte(shape: tuple[int, ...], address: int) -> None:
    assert content(capsule_over(on_gpu(shape=shape, address=address), Owner(), (1, 0))).data == address


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 0)], ids=str)
def test_a_consumer_gets_a_version_that_it_knows(version: tuple[int, int] | None) -> None:
    is_versioned = NUMPY_MAKES_VERSIONED and version is not None and version >= (1, 0)
    capsule = capsule_over(on_gpu(), Owner(), version)
    assert name_of(capsule) == (b"dltensor_versioned" if is_versioned else b"dltensor")
    if is_versioned:
        assert version_and_flags(capsule) == (1, 0, 0)


@both_kinds
def test_an_unused_capsule_keeps_the_owner_and_lets_go_of_it(version: tuple[int, int] | None) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = capsule_over(on_gpu(), owner, version)
    del owner
    gc.collect()
    assert alive() is not None
    del capsule
    assert alive() is None


@both_kinds
def test_a_capsule_that_goes_while_an_exception_is_raised_leaves_it_alone(version: tuple[int, int] | None) -> None:
    owner: list[Owner] = [Owner()]
    alive = weakref.ref(owner[0])
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        operator.index(capsule_over(on_gpu(), owner.pop(), version))  # type: ignore[arg-type]
    assert alive() is None


@both_kinds
def test_who_consumed_a_capsule_keeps_the_owner_until_he_is_gone(version: tuple[int, int] | None) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = capsule_over(on_gpu(), owner, version)
    _, consumed = taken_over(capsule)
    del owner, capsule
    gc.collect()
    assert alive() is not None
    del consumed
    assert alive() is None


def test_capsules_leak_nothing() -> None:
    owner = Owner()
    before = sys.getrefcount(owner)
    for version in [None, (1, 0)] * 50:
        taken_over(capsule_over(on_gpu(), owner, version))
        capsule_over(on_gpu(), owner, version)
    assert sys.getrefcount(owner) == before


# What is taken over


@both_kinds
@every_tensor
def test_what_was_made_is_taken_over_as_it_was(
    dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None
) -> None:
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


def test_host_memory_is_not_taken_over_and_stays_the_capsules() -> None:
    array = np.zeros(3)
    capsule = array.__dlpack__()
    with pytest.raises(TypeError, match="expected memory of a GPU .device type 2 or 13., found device type 1"):
        taken_over(capsule)
    assert name_of(capsule) == b"dltensor"


def test_managed_memory_is_taken_over() -> None:
    memory, _ = taken_over(onto_device(np.arange(3.0).__dlpack__(), MANAGED))
    assert (memory.device_type, memory.shape) == (MANAGED, (3,))


# PyTorch: its tensors and capsules, as if the host's memory were a GPU's


TORCH_NAMES = {
    **{name: name.lower() for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")},
    **{"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16"},
}


@both_kinds
@every_tensor
def test_what_pytorch_gives_away_is_read(dtype: DType, shape: tuple[int, ...], version: tuple[int, int] | None) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(shape, dtype=getattr(torch, TORCH_NAMES[dtype.name]))
    memory, _ = taken_over(onto_device(tensor.__dlpack__(max_version=version), CUDA, 1))
    assert (memory.dtype, memory.shape, memory.device_type, memory.device) == (dtype.numpy, shape, CUDA, 1)
    assert memory.address == (tensor.data_ptr() if tensor.numel() else 0)


def test_strides_and_beginning_of_a_part_of_a_tensor_are_read() -> None:
    torch = pytest.importorskip("torch")
    part = torch.zeros(6, 5, 4, dtype=torch.int16)[1::2, :, 2].T
    memory, _ = taken_over(onto_device(part.__dlpack__(), CUDA))
    assert (memory.shape, memory.strides) == ((5, 3), (8, 80))
    assert memory.address == part.data_ptr()


def test_a_type_that_triton_does_not_have_is_refused() -> None:
    capsule = np.zeros(2, np.complex64).__dlpack__()
    with pytest.raises(TypeError, match="has no counterpart in Triton"):
        taken_over(onto_device(capsule, CUDA))
    assert name_of(capsule) == b"dltensor"
