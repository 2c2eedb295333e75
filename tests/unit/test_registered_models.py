"""A registered model's rows, cast and broadcast as NumPy does it, and its outputs, which go to their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.compat.registered_model import Rows, _put, check_rows
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import PeerError, TensorShapeError

SIZES = st.sampled_from([1, 2, 3])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
COUNTS = st.integers(1, 4)


def assigned_at_once(data: npt.NDArray[Any], row_shape: tuple[int, ...], count: int) -> npt.NDArray[Any] | None:
    """Return what NumPy makes of it, so many rows at a time; None if it does not."""
    target = np.empty((len(data), *row_shape), np.float32)
    try:
        for begin in range(0, len(data), count):
            target[begin : begin + count] = data[begin : begin + count]
    except ValueError:
        return None
    return target


def assigned_one_by_one(data: list[Any], row_shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    target = np.empty((len(data), *row_shape), np.float32)
    try:
        for index, row in enumerate(data):
            target[index, ...] = row
    except ValueError:
        return None
    return target


def written(data: Any, row_shape: tuple[int, ...], count: int) -> npt.NDArray[Any] | None:
    """Return what the rows are, if they may be."""
    try:
        check_rows("X", data, row_shape, count)
    except TensorShapeError:
        return None
    target = np.empty((len(data), *row_shape), np.float32)
    for begin in range(0, len(data), count):
        rows = Rows("X", data[begin : begin + count], row_shape, target.dtype)
        assert rows.shape == target[begin : begin + count].shape
        rows.write_to(target[begin : begin + count])
    return target


def assert_same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> None:
    assert (one is None) is (other is None)
    if one is not None and other is not None:
        np.testing.assert_array_equal(one, other)


@given(length=st.integers(1, 9), shape=SHAPES, row_shape=SHAPES, count=COUNTS)
def test_an_array_is_taken_if_numpy_takes_it(
    length: int, shape: tuple[int, ...], row_shape: tuple[int, ...], count: int
) -> None:
    data = np.random.default_rng(0).integers(0, 100, (length, *shape))
    assert_same(written(data, row_shape, count), assigned_at_once(data, row_shape, count))


@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), row_shape=SHAPES, count=COUNTS)
def test_a_list_of_arrays_is_taken_if_numpy_takes_each(
    shapes: list[tuple[int, ...]], row_shape: tuple[int, ...], count: int
) -> None:
    data = [np.random.default_rng(index).random(shape) for index, shape in enumerate(shapes)]
    assert_same(written(data, row_shape, count), assigned_one_by_one(data, row_shape))


@pytest.mark.parametrize("row", [7, 7.5, True, "7.5", np.float16(7), [7], [[7, 8]], (7, 8), np.array(["7", "8"])])
def test_a_list_of_what_is_no_array_is_taken_if_numpy_takes_each(row: Any) -> None:
    assert_same(written([row] * 3, (2,), 2), assigned_one_by_one([row] * 3, (2,)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float64, np.bool_, ">f4", object, "U4"])
def test_numbers_of_any_dtype_are_cast(dtype: npt.DTypeLike) -> None:
    data = np.array([[0, 1], [1, 0]]).astype(dtype)
    rows = Rows("X", data, (2,), np.dtype(np.float32))
    target = np.empty((2, 2), np.float32)
    rows.write_to(target)
    np.testing.assert_array_equal(target, [[0, 1], [1, 0]])
    assert (rows.dtype, rows.byte_size) == (BY_NAME["FP32"], 16)


def test_values_that_cannot_be_cast_raise_what_numpy_raises() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        Rows("X", [["a", "b"]], (2,), np.dtype(np.float32)).write_to(np.empty((1, 2), np.float32))


def test_a_row_that_does_not_fit_is_named() -> None:
    with pytest.raises(TensorShapeError, match=r"input 'X': \[3\] does not fit the shape \[4\] that was registered"):
        check_rows("X", [np.ones(4), np.ones(3)], (4,), 8)


FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


def put(array: npt.NDArray[Any], shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Return what is there afterwards, where 7 was before."""
    target = np.full(shape, 7, dtype)
    _put("Y", array, target)
    return target


@pytest.mark.parametrize(
    ("array", "shape", "dtype", "expected"),
    [
        (FLOATS, (2, 3), np.float32, FLOATS),
        (FLOATS, (6,), np.float32, FLOATS.reshape(6)),
        (FLOATS.T, (6,), np.float32, FLOATS.T.reshape(6)),
        (FLOATS, (2, 3), np.int32, FLOATS.view(np.int32)),
        (FLOATS, (2, 4), np.float32, [[0, 1, 2, 0], [3, 4, 5, 0]]),
        (FLOATS, (3, 3), np.float32, [[0, 1, 2], [3, 4, 5], [0, 0, 0]]),
        (np.array([1, 2], np.uint8), (4,), np.uint16, [0x0201, 0, 0, 0]),
        (np.array([b"ab", b""], object), (12,), np.uint8, [*b"\2\0\0\0ab\0\0\0\0\0\0"]),
    ],
    ids=["as it is", "flat", "not contiguous", "bytes", "shorter rows", "fewer rows", "fewer bytes", "strings"],
)
def test_an_output_goes_where_it_was_declared_to_be(
    array: npt.NDArray[Any], shape: tuple[int, ...], dtype: Any, expected: Any
) -> None:
    assert np.array_equal(put(array, shape, dtype), expected)


def test_more_than_there_is_room_for_is_an_error() -> None:
    with pytest.raises(
        PeerError, match=r"output 'Y' is float32 of shape \[2, 3\], but was registered as float32, which"
    ):
        put(FLOATS, (2, 2))
