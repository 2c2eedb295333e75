"""DLPack capsules: what they hold, who owns them, and what is taken over from others."""

from __future__ import annotations

import ctypes
import struct
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.tensors import dlpack
from tests.unit.gpu.arrays.capsules import Content, content, name_of, pointer, version_and_flags

Array = npt.NDArray[Any]
NUMPY_SPEAKS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
every_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (0,), (3, 0, 2), (1, 1, 1), (2, 3, 4)]
STRIDED = {
    "transposed": lambda array: array.T,
    "every other": lambda array: array[::2, ::3],
    "backwards": lambda array: array[::-1],
    "a column": lambda array: array[:, 1],
    "broadcast": lambda array: np.broadcast_to(array[0], (4, 6)),
}


# Of DLTensor, after dlpack.h: the offset and the form of the fields that a test changes.
DEVICE_TYPE = (8, "<i")
TYPE_CODE = (20, "<B")
TYPE_BITS = (21, "<B")
TYPE_LANES = (22, "<H")
STRIDES = (32, "<Q")
BYTE_OFFSET = (40, "<Q")
DATA = (0, "<Q")
DELETER = (56, "<Q")  # of DLManagedTensor, which begins with its DLTensor


def change(capsule: object, field: tuple[int, str], value: int) -> None:
    """Change a field of a capsule's tensor, as another library might have filled it."""
    offset, form = field
    encoded = struct.pack(form, value)
    ctypes.memmove(pointer(capsule) + offset, encoded, len(encoded))


def sample(dtype: DType, shape: tuple[int, ...] = (2, 3)) -> Array:
    array = np.empty(shape, dtype.numpy)
    array[...] = np.arange(array.size).reshape(shape) % 2
    return array


def floats(shape: tuple[int, ...] = (4, 6)) -> Array:
    return sample(dtypes.BY_NAME["FP32"], shape)


class Exporter:
    """An object as NumPy consumes it: it has nothing to offer but one capsule."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def __dlpack__(self, **_: object) -> object:
        return self._capsule


def numpy_takes(capsule: object) -> Array:
    exporter: Any = Exporter(capsule)
    return np.from_dlpack(exporter)


@every_dtype
def test_a_capsule_says_type_shape_and_place_of_every_dtype_and_is_consumed_without_a_copy(dtype: DType) -> None:
    for shape in SHAPES:
        array = sample(dtype, shape)
        data_type = (dtype.dlpack_code, dtype.dlpack_bits, 1)
        expected = Content(array.ctypes.data, (1, 0), data_type, shape, None, 0)
        found = content(dlpack.export(array))._replace(strides=None)
        assert found == expected._replace(data=expected.data if array.size else found.data)
        if NUMPY_SPEAKS_VERSIONS:
            assert content(dlpack.export(array, (1, 0)))._replace(strides=None) == found
        taken = dlpack.consume(dlpack.export(array))
        assert (taken.dtype, taken.shape) == (dtype.numpy, shape)
        assert taken.ctypes.data == array.ctypes.data or not array.size
        np.testing.assert_array_equal(taken, array)
        taken[...] = 1
        assert (array == 1).all(), "it can be written to"
    assert dlpack.CPU_DEVICE == array.__dlpack_device__() == (1, 0)


def test_a_consumer_gets_a_capsule_of_version_1_if_it_knows_versions() -> None:
    for unversioned in (None, (0, 8), (0, 99)):
        assert name_of(dlpack.export(floats(), unversioned)) == b"dltensor"
    for version in ((1, 0), (1, 1), (2, 0)) if NUMPY_SPEAKS_VERSIONS else ():
        capsule = dlpack.export(floats(), version)
        assert name_of(capsule) == b"dltensor_versioned"
        assert version_and_flags(capsule)[0] == 1


@pytest.mark.parametrize("take", [numpy_takes, dlpack.consume, None], ids=["numpy", "consume", "nobody"])
def test_a_capsule_that_is_taken_or_not_keeps_the_array_until_the_last_view_of_it_dies(take: Any) -> None:
    array = floats()
    alive = weakref.ref(array)
    held = take(dlpack.export(array))[1:] if take else dlpack.export(array)
    del array
    assert alive() is not None
    del held
    assert alive() is None


@pytest.mark.parametrize(("shape", "strides"), [((0, 4), (4, 1)), ((3, 0), (0, 1)), ((2, 0, 3), (0, 3, 1))], ids=str)
def test_a_tensor_without_elements_has_the_strides_of_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    found = content(dlpack.export(floats(shape)))  # Triton's backend compares; NumPy's own are all 0
    assert found.strides in (None, strides)  # NumPy before 2 gives none, which means C order


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_every_stride_is_exported_and_consumed(strided: Any) -> None:
    for dtype in NUMBERS:
        array = dlpack.writable_alias(strided(sample(dtype, (4, 6))))
        taken = dlpack.consume(dlpack.export(array))
        assert taken.strides == array.strides
        np.testing.assert_array_equal(taken, array)
    array = dlpack.writable_alias(strided(floats()))
    np.testing.assert_array_equal(numpy_takes(dlpack.export(array)), array)


def test_a_tensor_may_have_no_strides_no_memory_an_offset_or_no_deleter() -> None:
    capsule = dlpack.export(floats())
    change(capsule, STRIDES, 0)  # which means C order
    np.testing.assert_array_equal(dlpack.consume(capsule), floats())
    capsule = dlpack.export(floats((0, 3)))
    change(capsule, DATA, 0)
    assert dlpack.consume(capsule).shape == (0, 3)
    array = floats((4,))
    capsule = dlpack.export(array[:2])
    change(capsule, BYTE_OFFSET, 8)
    assert dlpack.consume(capsule).ctypes.data == array[2:].ctypes.data
    capsule = dlpack.export(array)
    change(capsule, DELETER, 0)
    taken, alive = dlpack.consume(capsule), weakref.ref(array)
    del array, taken, capsule
    assert alive() is not None, "it is never deleted"


def test_what_is_no_capsule_or_a_used_or_versioned_one_is_not_consumed() -> None:
    capsule = dlpack.export(floats())
    taken = dlpack.consume(capsule)
    refused = [None, 0, "dltensor", np.zeros(3), object(), type("PyCapsule", (), {})(), ctypes.pythonapi, capsule]
    for each in [*refused, dlpack.export(floats(), (1, 0))] if NUMPY_SPEAKS_VERSIONS else refused:
        with pytest.raises(TypeError, match="expected an unused DLPack capsule 'dltensor', found "):
            dlpack.consume(each)
    np.testing.assert_array_equal(taken, floats())


@pytest.mark.parametrize("device_type", [2, 3, 13])
def test_memory_of_another_device_is_not_consumed_and_stays_the_capsules(device_type: int) -> None:
    array = floats()
    alive = weakref.ref(array)
    capsule = dlpack.export(array)
    change(capsule, DEVICE_TYPE, device_type)
    with pytest.raises(TypeError, match=f"expected CPU memory .*, found device type {device_type}"):
        dlpack.consume(capsule)
    assert name_of(capsule) == b"dltensor"
    del array, capsule
    assert alive() is None


@pytest.mark.parametrize(
    ("code", "bits", "lanes"),
    # bfloat32, two bfloat16, complex64, four float32, float8, a bit, nobody's, strings
    [(4, 32, 1), (4, 16, 2), (5, 64, 1), (2, 32, 4), (2, 8, 1), (0, 1, 1), (255, 32, 1), (255, 0, 1)],
)
def test_a_data_type_without_a_counterpart_in_triton_is_not_consumed(code: int, bits: int, lanes: int) -> None:
    capsule = dlpack.export(floats())
    change(capsule, TYPE_CODE, code)
    change(capsule, TYPE_BITS, bits)
    change(capsule, TYPE_LANES, lanes)
    with pytest.raises(TypeError, match=f"code {code} with {bits} bits and {lanes} lanes has no counterpart"):
        dlpack.consume(capsule)


def test_a_capsule_that_a_consumer_gave_a_name_of_its_own_is_marked_as_used() -> None:
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    own_name = b"used_dlpack"  # which is no copy of a capsule's
    capsule = dlpack.export(floats())
    taken = dlpack.consume(capsule)
    rename(capsule, own_name)
    dlpack.mark_used(capsule)
    assert name_of(capsule) == b"used_dltensor"
    np.testing.assert_array_equal(taken, floats())


@every_dtype
def test_a_writable_alias_is_the_same_memory_in_the_same_strides(dtype: DType) -> None:
    strides: list[Array] = [strided(sample(dtype, (4, 6))) for strided in STRIDED.values()]  # type: ignore[no-untyped-call]
    for array in [*[sample(dtype, shape) for shape in SHAPES], *strides]:
        assert not array.flags.writeable or dlpack.writable_alias(array) is array
        array.flags.writeable = False
        alias = dlpack.writable_alias(array)
        assert (alias.flags.writeable, array.flags.writeable) == (True, False)
        assert (alias.dtype, alias.shape) == (array.dtype, array.shape)
        assert not array.size or (alias.ctypes.data, alias.strides) == (array.ctypes.data, array.strides)
        np.testing.assert_array_equal(alias, array)
