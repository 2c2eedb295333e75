"""Rows that are gathered where a GPU is: on it if all of them are there, else on the host, in memory pinned for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model.devices.arrays import DeviceArrays
from shm_backend_utils.model.devices.uses import DeviceUses
from shm_backend_utils.model.mapping.pinning import Pinning
from shm_backend_utils.model.modes.gathering import Buffers, Gathering, with_rows
from shm_backend_utils.tensors.attributes import MemoryType
from shm_backend_utils.tensors.cuda.device_view import DeviceView
from shm_backend_utils.tensors.view import TensorView
from tests.unit.fake_gpu import (
    DRIVER,
    INTEGERS,
    MODEL,
    array_on,
    content,
    kernel,
    left_of,
    runtime_that_gives_all_back,
    stream_on,
    wait_until,
)

INT32 = dtypes.BY_NAME["INT32"]


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def arrays(cuda: CudaRuntime) -> Iterator[DeviceArrays]:
    arrays = DeviceArrays(CudaAccess(lambda: cuda), 0)
    yield arrays
    wait_until(lambda: not cuda.retired.collect())
    arrays.close()


@pytest.fixture
def buffers(cuda: CudaRuntime) -> Iterator[Buffers]:
    """Pinned ones."""
    buffers = Buffers(Pinning(CudaAccess(lambda: cuda), pytest.fail))
    yield buffers
    buffers.close()


def rows(cuda: CudaRuntime, arrays: DeviceArrays, device: int | None, value: int) -> TensorView:
    """Return two rows on a GPU, or on the host."""
    if device is None:
        return TensorView("X", np.full((2, 3), value, INTEGERS), INT32, "direct")
    return arrays.view("X", array_on(cuda, np.full((2, 3), value), device, INTEGERS), INT32, "direct", writable=True)


@pytest.mark.parametrize(
    ("devices", "is_on_gpu"),
    [((0, 0), True), ((0, 1), False), ((0, None), False), ((None, 0), False), ((None, None), False)],
    ids=str,
)
def test_rows_are_gathered_on_the_gpu_that_has_all_of_them_or_on_the_host(
    cuda: CudaRuntime, arrays: DeviceArrays, buffers: Buffers, devices: tuple[int | None, ...], is_on_gpu: bool
) -> None:
    parts = [rows(cuda, arrays, device, value) for value, device in enumerate(devices)]
    gathering = Gathering(buffers, arrays, 0)
    whole = gathering.gather(parts, 4)
    assert isinstance(whole, DeviceView) == is_on_gpu
    found: Any = content(whole.array) if is_on_gpu else whole.numpy()
    assert found.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert is_on_gpu or not found.flags.writeable
    assert gathering.byte_count == 48


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_rows_on_one_gpu_never_come_to_the_host(
    cuda: CudaRuntime, arrays: DeviceArrays, buffers: Buffers, is_named: bool
) -> None:
    parts = [rows(cuda, arrays, 0, 0) for _ in range(3)]
    uses = DeviceUses(arrays)
    with stream_on(cuda) as stream:
        uses.add(0)
        if is_named:
            uses.name(stream)
        for value, part in enumerate(parts):
            kernel(stream, lambda memory, value=value: memory.fill(value), part.array)
        gathering = Gathering(buffers, arrays, 0)
        whole = gathering.gather(parts, 6, uses)
        room = gathering.room(parts, (6, 3))
        assert isinstance(room, DeviceView)
        kernel(stream, lambda source, target: np.multiply(source, 10, out=target), whole.array, room.array)
        gathering.scatter(with_rows(room, parts), uses)
        uses.wait()
        assert [content(part.array)[0, 0] for part in parts] == [0, 10, 20]
    assert (left_of(MODEL).pinned, gathering.byte_count) == (0, 144)
    assert DRIVER.count("cuMemcpyAsync", MODEL) == 6


def test_room_for_rows_of_several_gpus_is_on_the_host(
    cuda: CudaRuntime, arrays: DeviceArrays, buffers: Buffers
) -> None:
    parts = [rows(cuda, arrays, device, 0) for device in (0, 1, None)]
    gathering = Gathering(buffers, arrays, 0)
    room = gathering.room(parts, (6, 3))
    room.numpy()[:] = np.arange(6)[:, None]
    gathering.scatter(with_rows(room, parts))
    assert [content(part.array)[1, 0] for part in parts[:2]] == [1, 3]
    assert parts[2].numpy()[1, 0] == 5


# Buffers


def test_a_buffer_is_pinned_until_a_larger_one_takes_its_place_or_all_are_let_go_of(
    cuda: CudaRuntime, buffers: Buffers
) -> None:
    small, kind = buffers.get("0 input X", 8)
    assert kind is MemoryType.CPU_PINNED
    assert buffers.get("0 input X", small.nbytes)[0] is small
    large, _ = buffers.get("0 input X", small.nbytes + 1)
    assert large is not small
    wait_until(lambda: not cuda.retired.collect())
    assert left_of(MODEL).pinned == 1
    buffers.get("0 input Z", 8)
    assert left_of(MODEL).pinned == 2
    buffers.close()
    wait_until(lambda: not cuda.retired.collect())
    assert left_of(MODEL).pinned == 0
