"""What holds for every array that a user may pass, and for every tensor of strings, honest or not."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.sources import Source, sources
from shm_backend_utils.dtypes import LENGTH_SIZE
from shm_backend_utils.errors import TensorError, TensorTypeError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.tensors.strings import Strings

Array = npt.NDArray[Any]

DTYPES = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
INTEGERS = [dtype for dtype in DTYPES if dtype.numpy.kind in "iu"]
FRACTIONS = [dtype for dtype in DTYPES if dtype.numpy.kind == "f" or dtype is dtypes.BF16]


def source(value: Any, dtype: dtypes.DType, rank: int) -> Source:
    """Return what is made of a value that is passed for an input of this type and of any shape of this rank."""
    tensor = {"name": "X", "data_type": f"TYPE_{dtype.name}", "dims": [-1] * rank}
    return sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]


def written(source: Source) -> Array:
    """Return what is written into memory that had other content before."""
    memory = np.frombuffer(
        bytearray(b"\xa5" * (source.dtype.itemsize * int(np.prod(source.shape, dtype=int)))), np.uint8
    )
    target: Array = np.ndarray(source.shape, source.dtype.numpy, buffer=memory.data)
    source.write_to(target)
    return target


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any], min_dims: int = 0) -> Array:
    """Arrays in any order: C, Fortran, permuted, strided, reversed, broadcast, of either byte order, empty or 0-d."""
    stored = dtype.newbyteorder(draw(st.sampled_from("<>")))
    shapes = hnp.array_shapes(min_dims=min_dims, max_dims=4, min_side=0, max_side=5)
    if dtype == dtypes.BF16.numpy:
        array: Array = draw(hnp.arrays(np.uint16, shapes)).view(stored)  # it would not know how to draw others
    else:
        array = draw(hnp.arrays(stored, shapes))
    if array.ndim:
        axes = draw(st.permutations(range(array.ndim)))
        array = array.transpose(axes)
        array = array[tuple(slice(None, None, draw(st.sampled_from([1, 2, 3, -1, -2]))) for _ in axes)]
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if draw(st.booleans()) and array.ndim < 4:
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


def same_bits(found: Array, expected: Array) -> bool:
    """Return whether two arrays hold the same numbers to the bit, whatever their order in memory."""
    native = np.ascontiguousarray(expected, expected.dtype.newbyteorder("="))
    return (found.dtype, found.shape) == (native.dtype, expected.shape) and found.tobytes() == native.tobytes()


@given(st.data(), st.sampled_from(DTYPES))
def test_any_array_arrives_as_it_is(data: st.DataObject, dtype: dtypes.DType) -> None:
    array = data.draw(arrays(dtype.numpy))
    made = source(array, dtype, array.ndim)
    assert (made.dtype, made.shape, made.byte_size, made.device) == (dtype, array.shape, array.nbytes, None)
    assert same_bits(written(made), array)


@given(st.data(), st.sampled_from(DTYPES))
def test_a_list_of_rows_is_what_numpy_stacks(data: st.DataObject, dtype: dtypes.DType) -> None:
    whole = data.draw(arrays(dtype.numpy, min_dims=1).filter(lambda array: len(array) > 0))
    rows = [row if data.draw(st.booleans()) else row.copy("F") for row in whole]
    if whole.ndim == 1:
        rows = [np.asarray(row) for row in rows]
    made = source(rows, dtype, whole.ndim)
    assert same_bits(written(made), np.stack(rows))


@given(st.data(), st.sampled_from(DTYPES))
def test_a_list_of_parts_is_what_numpy_concatenates(data: st.DataObject, dtype: dtypes.DType) -> None:
    whole = data.draw(arrays(dtype.numpy, min_dims=1))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    tensor = {"name": "X", "data_type": f"TYPE_{dtype.name}", "dims": [-1] * (whole.ndim - 1)}
    batches = ModelSpec.from_config({"name": "model", "input": [tensor], "max_batch_size": 8})
    assert same_bits(written(sources(batches, {"X": parts})["X"]), np.concatenate(parts))


@given(st.data(), st.sampled_from(INTEGERS))
def test_integers_are_kept_exactly_or_refused(data: st.DataObject, dtype: dtypes.DType) -> None:
    limits = np.iinfo(dtype.numpy)
    low, high = int(limits.min), int(limits.max)
    values = data.draw(st.lists(st.integers(low, high) | st.integers(2 * low - 1, 2 * high), min_size=1, max_size=4))
    if all(low <= value <= high for value in values):
        assert written(source(values, dtype, 1)).tolist() == values
    else:
        with pytest.raises(TensorTypeError):
            source(values, dtype, 1)


@given(st.lists(st.floats(width=64), max_size=4), st.sampled_from(FRACTIONS))
def test_fractions_are_as_near_as_the_dtype_can_or_refused(values: list[float], dtype: dtypes.DType) -> None:
    with np.errstate(over="ignore"):
        nearest = np.array(values, np.float64).astype(dtype.numpy)
    if (np.isinf(nearest) != np.isinf(values)).any():
        with pytest.raises(TensorTypeError):
            source(values, dtype, 1)
    else:
        assert written(source(values, dtype, 1)).tobytes() == nearest.tobytes()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.binary(), max_size=4))
def test_strings_and_bytes_arrive_as_they_are(values: list[str | bytes]) -> None:
    tensor = {"name": "X", "data_type": "TYPE_STRING", "dims": [-1]}
    made = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": values})["X"]
    target: Array = np.empty(made.shape, made.dtype.numpy)
    made.write_to(target)
    assert target.tolist() == values


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
def test_strings_are_lengths_and_bytes_and_the_same_after_having_been_that(
    array: npt.NDArray[Any], room: bytes
) -> None:
    given, expected = Strings.of("TEXT", array), [as_bytes(word) for word in array.ravel()]
    encoded = given.encoded.tobytes()
    assert encoded == b"".join(len(word).to_bytes(LENGTH_SIZE, "little") + word for word in expected)
    for strings in (given, read(encoded + room, array.shape)):
        assert list(strings) == expected
        assert strings.numpy().shape == array.shape
        assert strings.numpy().ravel().tolist() == expected


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
