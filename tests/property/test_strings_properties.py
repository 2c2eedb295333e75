"""What holds for every tensor of strings, and for all bytes that somebody passes off as one."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.dtypes import LENGTH_SIZE
from shm_backend_utils.errors import TensorError
from shm_backend_utils.tensors.strings import Strings

words = st.binary(max_size=40) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
# Mostly lengths that are small or next to a limit: others are refused at once.
lengths = st.integers(0, 6) | st.sampled_from([2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1])
hostile = st.lists(st.binary(max_size=6) | lengths.map(struct.Struct("<I").pack)).map(b"".join)


@st.composite
def tensors(draw: st.DrawFn) -> npt.NDArray[np.object_]:
    """Arrays of bytes and of text, of any shape, in C order or Fortran's."""
    shape = draw(shapes)
    array = np.empty(math.prod(shape), object)
    array[:] = draw(st.lists(words, min_size=array.size, max_size=array.size))
    return array.reshape(shape, order=draw(st.sampled_from("CF")))


def as_bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def read(data: bytes, shape: tuple[int, ...]) -> Strings:
    return Strings.encoded_as("TEXT", np.frombuffer(data, np.uint8), shape)


@given(tensors(), st.binary(max_size=8))
def test_strings_are_the_same_after_having_been_bytes(array: npt.NDArray[Any], room: bytes) -> None:
    encoded = Strings.of("TEXT", array).encoded.tobytes()
    expected = [as_bytes(word) for word in array.ravel()]
    strings = read(encoded + room, array.shape)
    assert list(strings) == expected
    assert strings.numpy().shape == array.shape
    assert strings.numpy().ravel().tolist() == expected


@given(tensors())
def test_bytes_are_the_lengths_and_the_strings_and_nothing_else(array: npt.NDArray[Any]) -> None:
    encoded = Strings.of("TEXT", array).encoded
    expected = [as_bytes(word) for word in array.ravel()]
    assert encoded.tobytes() == b"".join(len(word).to_bytes(LENGTH_SIZE, "little") + word for word in expected)


@given(hostile, shapes)
def test_any_bytes_are_refused_or_are_strings_side_by_side(data: bytes, shape: tuple[int, ...]) -> None:
    strings = read(data, shape)
    try:
        found = list(strings)
    except TensorError:
        assert not begins_with_strings(data, math.prod(shape))
        return
    assert len(found) == math.prod(shape)
    assert data.startswith(Strings.of("TEXT", strings.numpy()).encoded.tobytes())


def begins_with_strings(data: bytes, count: int) -> bool:
    """Tell it in the slow and obvious way: take one string after another away."""
    for _ in range(count):
        length = int.from_bytes(data[:4], "little")
        if len(data) < 4 + length:
            return False
        data = data[4 + length :]
    return True


@given(st.lists(words, max_size=20))
def test_strings_that_came_as_objects_are_those_that_come_as_bytes(given_words: list[str | bytes]) -> None:
    array = np.empty(len(given_words), object)
    array[:] = given_words
    strings = Strings.of("TEXT", array)
    assert list(strings) == list(read(strings.encoded.tobytes(), strings.shape))
    assert strings.numpy().tolist() == [as_bytes(word) for word in given_words]
