"""Rows that are gathered where a GPU is: on it if all of them are there, else on the host, in memory pinned for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.model.devices.arrays import DeviceArrays
from shm_backend_utils.model.mapping.pinning import Pinning
from shm_backend_utils.model.modes.gathering import Buffers, Gathering
from shm_backend_utils.tensors.attributes import MemoryType
from shm_backend_utils.tensors.device_view import DeviceView
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import INTEGERS, runtime_that_gives_all_back

INT32 = dtypes.BY_NAME["INT32"]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def arrays(cuda: FakeCuda) -> DeviceArrays:
    return DeviceArrays(CudaAccess(lambda: cuda), 0)


@pytest.fixture
def buffers(cuda: FakeCuda) -> Iterator[Buffers]:
    """Pinned ones."""
    buffers = Buffers(Pinning(CudaAccess(lambda: cuda), pytest.fail))
    yield buffers
    buffers.close()


def rows(cuda: FakeCuda, arrays: DeviceArrays, device: int | None, value: int) -> TensorView:
    """Return two rows on a GPU, or on the host."""
    if device is None:
        return TensorView("X", np.full((2, 3), value, INTEGERS), INT32, "direct")
    with device_guard(cuda, device):
        array = cuda.empty((2, 3), INTEGERS)
    array.peek()[:] = value
    return arrays.view("X", array, INT32, "direct", writable=False)


@pytest.mark.parametrize(
    ("devices", "is_on_gpu"),
    [((0, 0), True), ((0, 1), False), ((0, None), False), ((None, 0), False), ((None, None), False)],
    ids=str,
)
def test_rows_are_gathered_on_the_gpu_that_has_all_of_them_or_on_the_host(
    cuda: FakeCuda, arrays: DeviceArrays, buffers: Buffers, devices: tuple[int | None, ...], is_on_gpu: bool
) -> None:
    parts = [rows(cuda, arrays, device, value) for value, device in enumerate(devices)]
    gathering = Gathering(buffers, arrays, 0)
    whole = gathering.gather(parts, 4)
    assert isinstance(whole, DeviceView) == is_on_gpu
    arrays.synchronize([0, 1])
    found: Any = whole.array.peek() if is_on_gpu else whole.numpy()
    assert found.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert is_on_gpu or not found.flags.writeable
    assert gathering.byte_count == 48


# Buffers


def test_a_buffer_is_pinned_until_a_larger_one_takes_its_place_or_all_are_let_go_of(
    cuda: FakeCuda, buffers: Buffers
) -> None:
    small, kind = buffers.get("0 input X", 8)
    assert kind is MemoryType.CPU_PINNED
    assert buffers.get("0 input X", small.nbytes)[0] is small
    large, _ = buffers.get("0 input X", small.nbytes + 1)
    assert large is not small
    assert cuda.live.pinned == 1
    buffers.get("0 input Z", 8)
    assert cuda.live.pinned == 2
    buffers.close()
    assert cuda.live.pinned == 0
