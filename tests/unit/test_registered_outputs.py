"""An output goes where it was declared to be: as it is, as a part of it, or by its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.compat.registered_model import _put
from shm_backend_utils.errors import PeerError

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


def put(array: npt.NDArray[Any], shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Return what is there afterwards, where 7 was before."""
    target = np.full(shape, 7, dtype)
    _put("Y", array, target)
    return target


def test_as_it_is() -> None:
    assert np.array_equal(put(FLOATS, (2, 3)), FLOATS)


def test_flat() -> None:
    assert np.array_equal(put(FLOATS, (6,)), FLOATS.reshape(6))


def test_by_its_bytes() -> None:
    assert np.array_equal(put(FLOATS, (2, 3), np.int32), FLOATS.view(np.int32))


def test_each_row_of_a_smaller_one_in_its_place() -> None:
    assert put(FLOATS, (2, 4)).tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]


def test_fewer_rows() -> None:
    assert put(FLOATS, (3, 3)).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]


def test_fewer_bytes_of_another_dtype() -> None:
    assert put(np.array([1, 2], np.uint8), (4,), np.uint16).tolist() == [0x0201, 0, 0, 0]


def test_strings_as_they_lie_in_memory() -> None:
    words = np.array([b"ab", b""], object)
    assert put(words, (12,), np.uint8).tobytes() == b"\2\0\0\0ab\0\0\0\0\0\0"


def test_what_is_not_contiguous() -> None:
    assert np.array_equal(put(FLOATS.T, (6,)), FLOATS.T.reshape(6))


def test_more_than_there_is_room_for_is_an_error() -> None:
    with pytest.raises(
        PeerError, match=r"output 'Y' is float32 of shape \[2, 3\], but was registered as float32, which"
    ):
        put(FLOATS, (2, 2))
