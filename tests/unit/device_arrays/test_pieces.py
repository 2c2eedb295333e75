"""Copies as rectangles: what they write is what NumPy would, whatever the strides; and they are few."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.tensors.cuda.pieces import Plan, plan

Array = npt.NDArray[Any]


def planned(target: Array, source: Array) -> Plan:
    return plan(target.shape, target.strides, source.strides, target.itemsize)


def memory_of(array: Array) -> tuple[Array, int]:
    """Return the memory that an array is a part of, as bytes, and where the array begins there."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return whole.reshape(-1).view(np.uint8), array.ctypes.data - whole.ctypes.data


def carried_out(target: Array, source: Array) -> Plan:
    """Copy as CUDA would, which refuses rows that overlap."""
    found = planned(target, source)
    (into, into_begin), (out_of, out_of_begin) = memory_of(target), memory_of(source)
    if found.count:
        assert found.height == 1 or min(found.target_pitch, found.source_pitch) >= found.width
    pieces = list(found.pieces())
    assert len(pieces) == found.count
    for piece in pieces:
        for row in range(found.height):
            to = into_begin + piece.target + row * found.target_pitch
            by = out_of_begin + piece.source + row * found.source_pitch
            assert min(to, by) >= 0
            assert max(to + found.width - into.size, by + found.width - out_of.size) <= 0
            into[to : to + found.width] = out_of[by : by + found.width]
    return found


def numbers(shape: tuple[int, ...], dtype: Any = np.int32) -> Array:
    return (np.arange(math.prod(shape)) % 251).astype(dtype).reshape(shape)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any, *, may_repeat: bool) -> Array:
    """Return an array of a shape, some of whose axes are permuted, backwards, with gaps or broadcast."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    repeated = [may_repeat and draw(st.integers(0, 5)) == 0 for _ in shape]
    sizes = [1 if repeat else abs(step) * size for size, step, repeat in zip(shape, steps, repeated, strict=True)]
    margin = draw(st.integers(0, 2))
    memory = numbers((math.prod(sizes) + 2 * margin,), dtype)
    inner = memory[margin : memory.size - margin].reshape([sizes[axis] for axis in order])
    array = inner.transpose(np.argsort(order)) if shape else inner.reshape(())
    for axis, (step, repeat) in enumerate(zip(steps, repeated, strict=True)):
        if not repeat:
            array = array[(slice(None),) * axis + (slice(None, None, step),)]
    return np.broadcast_to(array, shape)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.int64]))
    target = draw(strided(shape, dtype, may_repeat=False))
    target.flags.writeable = True
    target[...] = 0
    return target, draw(strided(shape, dtype, may_repeat=True))


@pytest.mark.filterwarnings("ignore:.*setting of the writeable flag:DeprecationWarning")
@given(pairs())
def test_a_copy_in_pieces_is_numpys_copy(pair: tuple[Array, Array]) -> None:
    target, source = pair
    whole, _ = memory_of(target)
    before = whole.copy()
    carried_out(target, source)
    written = whole.copy()
    whole[:] = before
    target[...] = source
    np.testing.assert_array_equal(written, whole)  # nothing beside it, too


@pytest.mark.parametrize(
    ("target", "source", "copies"),
    [
        (np.empty((2, 3, 4), np.int32), numbers((2, 3, 4)), (96, 1, 1)),
        (np.empty((2, 0, 3)), np.empty((2, 0, 3)), None),
        (np.empty((10, 12, 3), np.uint8), numbers((20, 30, 3), np.uint8)[5:15, 7:19], (36, 10, 1)),
        (np.empty((2, 3, 8, 9), np.int32), numbers((2, 8, 9, 3)).transpose(0, 3, 1, 2), (4, 72, 6)),
        (np.empty((4, 5, 6), np.int32, order="F"), np.asfortranarray(numbers((4, 5, 6))), (480, 1, 1)),
        (np.empty(10, np.int32)[::-1], numbers((10,))[::-1], (40, 1, 1)),
        (np.empty((7, 50), np.int32), numbers((50, 7)).T, (4, 50, 7)),
    ],
    ids=["contiguous", "empty", "a crop", "channels last", "both Fortran", "both backwards", "transposed"],
)
def test_copies_are_as_few_as_can_be(target: Array, source: Array, copies: tuple[int, int, int] | None) -> None:
    found = carried_out(target, source)
    assert (found.width, found.height, found.count) == copies if copies else found.count == 0


def test_a_single_element_is_a_copy_whatever_strides_it_has() -> None:
    found = plan((1, 1), (-8, 3), (0, 10**12), 4)
    assert (found.width, found.height, found.count) == (4, 1, 1)


def test_rows_further_apart_than_cuda_goes_are_copied_one_by_one() -> None:
    found = plan((3, 4), (16, 4), (2**31, 4), 4)
    assert (found.width, found.height, found.count) == (16, 1, 3)
