"""Copies between GPUs and the host, as few rectangles: what arrives, in which order, and when memory is done with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import TensorError
from shm_backend_utils.gpu.arrays import device_array
from shm_backend_utils.gpu.arrays.copies import MAX_PIECES, copy
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.pieces import Plan, plan
from tests.unit.gpu.arrays.conftest import Array, Gpu, numbers
from tests.unit.gpu.fakes import DRIVER, fails_by, kernel

ORDERS: dict[str, Any] = {
    "contiguous": lambda: numbers((6, 5, 4)),
    "a part": lambda: numbers((9, 7, 4))[2:8, 1:6],
    "every other": lambda: numbers((12, 5, 8))[::2, :, ::2],
    "transposed": lambda: numbers((4, 5, 6)).T,
    "backwards": lambda: numbers((6, 5, 4))[::-1, :, ::-1],
    "channels last": lambda: numbers((6, 4, 5)).transpose(0, 2, 1),
}
TO = {"to the same GPU": 0, "to another GPU": 1}


def same_bytes(found: Array, expected: Array) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", TO.values(), ids=list(TO))
@pytest.mark.parametrize("out_of", ORDERS.values(), ids=list(ORDERS))
def test_any_order_becomes_any_other(gpu: Gpu, out_of: Any, device: int) -> None:
    values, stream = out_of(), gpu.stream()
    for into in ORDERS.values():
        source, target = gpu.strided(values), gpu.strided(into() * 0, device)
        copy(gpu.runtime, target, source, stream)
        gpu.wait()
        same_bytes(gpu.read(target), values)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_arrays_of_the_host_may_be_of_any_order(gpu: Gpu, order: Any) -> None:
    values, back, stream = order(), order(), gpu.stream()
    back[...] = 0
    there = gpu.strided(order())
    copy(gpu.runtime, there, values, stream)
    copy(gpu.runtime, back, there, stream)
    same_bytes(back, values)


def test_the_stream_may_be_of_another_gpu_than_the_array(gpu: Gpu) -> None:
    values, back = numbers((6, 5)), np.zeros((6, 5), np.int32)
    there, stream = gpu.empty((6, 5), device=1), gpu.stream(0)
    copy(gpu.runtime, there, values, stream)
    copy(gpu.runtime, back, there, stream)
    same_bytes(back, values)


@pytest.fixture
def small_pitches(gpu: Gpu) -> Iterator[None]:
    stream = gpu.stream()
    with gpu.runtime.on(0), fails_by("CUDA_ERROR_INVALID_VALUE"):
        gpu.runtime.copy_rows(gpu.empty((2,)).address, 2**31, gpu.empty((2,)).address, 4, 4, 1, stream)
    DRIVER.max_pitch(8)
    yield
    DRIVER.max_pitch()


@pytest.mark.usefixtures("small_pitches")
def test_rows_that_cuda_refuses_as_a_rectangle_are_copied_one_by_one(gpu: Gpu) -> None:
    values = numbers((20, 30, 3), np.uint8)[5:15, 7:19]
    target = gpu.empty(values.shape, np.uint8)
    copy(gpu.runtime, target, gpu.strided(values), gpu.stream())
    gpu.wait()
    same_bytes(gpu.read(target), values)
    assert DRIVER.count("cuMemcpyAsync") == len(values)
    many = numbers((MAX_PIECES + 1, 10), np.uint8)[:, :9]
    with pytest.raises(TensorError, match="tensor 'X' of shape .4097, 9. .* 4097 copies, more than 4096; make it cont"):
        copy(gpu.runtime, gpu.empty(many.shape, np.uint8), gpu.strided(many), gpu.stream(), tensor="X")


def test_what_lies_in_too_many_pieces_is_refused_with_the_way_out(gpu: Gpu) -> None:
    values = np.broadcast_to(numbers((1,)), (MAX_PIECES + 1,))
    with pytest.raises(TensorError, match="tensor 'X' of shape .4097,. .* 4097 copies, more than 4096; make it contig"):
        copy(gpu.runtime, gpu.empty(values.shape), gpu.strided(values), gpu.stream(), tensor="X")


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), np.int64), ((3, 2), np.int32), ((6,), np.int32)], ids=str)
def test_other_shapes_and_sizes_are_refused(gpu: Gpu, shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(TensorError, match="cannot be copied to one of shape"):
        copy(gpu.runtime, gpu.empty((2, 3)), np.zeros(shape, dtype), gpu.stream())


# In which order


@pytest.mark.parametrize("says_so", [True, False], ids=["it says so", "it does not: the copy is wrong"])
@pytest.mark.parametrize("device", TO.values(), ids=list(TO))
def test_a_copy_waits_for_who_writes_the_array(gpu: Gpu, device: int, says_so: bool) -> None:
    values = numbers((100,))
    target, stream = gpu.empty((100,), device=device), gpu.stream(device)
    source = gpu.written_late(values, says_so=says_so)
    copy(gpu.runtime, target, source, stream)
    gpu.wait()
    assert np.array_equal(gpu.read(target), values) is says_so


@pytest.mark.parametrize("device", TO.values(), ids=list(TO))
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_default_stream_is_that_of_the_targets_gpu(gpu: Gpu, stream: int, device: int) -> None:
    target = gpu.empty((100,), device=device)
    source = gpu.written_late(numbers((100,)), says_so=True)
    copy(gpu.runtime, target, source, stream)
    gpu.runtime.synchronize_stream(stream, device)
    same_bytes(gpu.read(target), numbers((100,)))


@pytest.mark.parametrize("says_so", [True, False], ids=["it says so", "it does not: the reader is wrong"])
@pytest.mark.parametrize("stream", ["its own", "legacy", "none", "-1"])
def test_a_consumers_stream_waits_for_who_writes_the_array(gpu: Gpu, stream: str, says_so: bool) -> None:
    values, read = numbers((100,)), np.zeros(100, np.int32)
    own = gpu.stream()
    source = gpu.written_late(values, says_so=says_so)
    asked, launched = {"its own": (own, own), "legacy": (1, 1), "none": (None, 1), "-1": (-1, own)}[stream]
    source.__dlpack__(stream=asked)
    with gpu.runtime.on(0):
        kernel(launched, lambda memory: np.copyto(read, memory), source, late_s=0)
    gpu.wait()
    assert np.array_equal(read, values) is (says_so and stream != "-1")


def test_an_array_on_the_host_and_cudas_interface_are_read_when_the_array_is_written(gpu: Gpu) -> None:
    same_bytes(gpu.written_late(numbers((5, 10)), says_so=False).to_host(), numbers((5, 10)))
    same_bytes(gpu.empty((0, 3)).to_host(), np.empty((0, 3), np.int32))
    array = gpu.written_late(numbers((50,)), says_so=True)
    assert array.__cuda_array_interface__["data"] == (array.address, False)
    same_bytes(gpu.read(array), numbers((50,)))


def test_cupys_current_stream_waits_for_who_writes_the_array(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    read, current = np.zeros(50, np.int32), gpu.stream()
    monkeypatch.setattr(device_array, "cupy_stream", lambda device: {0: current}[device])
    array = gpu.written_late(numbers((50,)), says_so=True)
    assert array.cupy().data.ptr == array.address
    copy(gpu.runtime, read, DeviceArray(gpu.runtime, array.address, (50,), array.dtype, 0, array), current)
    same_bytes(read, numbers((50,)))


def memory_of(array: Array) -> tuple[Array, int]:
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return whole.reshape(-1).view(np.uint8), array.ctypes.data - whole.ctypes.data


def carried_out(target: Array, source: Array) -> Plan:
    found = plan(target.shape, target.strides, source.strides, target.itemsize)
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


@pytest.mark.parametrize(
    ("shape", "target", "source", "copies"),
    [((1, 1), (-8, 3), (0, 10**12), (4, 1, 1)), ((3, 4), (16, 4), (2**31, 4), (16, 1, 3))],
    ids=["a single element, whatever its strides are", "rows further apart than CUDA goes"],
)
def test_some_rows_are_copied_one_by_one(shape: Any, target: Any, source: Any, copies: tuple[int, int, int]) -> None:
    found = plan(shape, target, source, 4)
    assert (found.width, found.height, found.count) == copies
