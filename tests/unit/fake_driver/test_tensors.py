"""Tensors on the fake: as capsules, by the CUDA array interface, as slices, and late."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from shm_backend_utils.testing.fake_cuda.tensor import Kind
from tests.unit.fake_driver.asked import done

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def fields(capsule: object, name: bytes = b"dltensor") -> tuple[int, int, int, int, int]:
    """Return address, device type, device, type code and bits of what a capsule holds."""
    at = pointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    kind, device = (ctypes.c_int32.from_address(at + offset).value for offset in (8, 12))
    code, bits = (ctypes.c_uint8.from_address(at + offset).value for offset in (20, 21))
    return ctypes.c_uint64.from_address(at).value, kind, device, code, bits


@pytest.mark.parametrize(("kind", "device_type"), [("device", 2), ("pool", 2), ("managed", 13), ("vmm", 2)])
def test_a_capsule(driver: FakeDriver, cuda: Any, kind: Kind, device_type: int) -> None:
    tensor = driver.tensor(np.arange(4, dtype=np.float32), device=1, kind=kind)
    assert fields(tensor.__dlpack__()) == (tensor.address, device_type, 1, 2, 32)
    assert tensor.__dlpack_device__() == (device_type, 1)
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        capsule = tensor.__dlpack__(max_version=(1, 1))
        assert fields(capsule, b"dltensor_versioned")[0] == tensor.address
        del capsule
    del tensor
    gc.collect()
    with cuda.context(1):
        done(cuda.cuCtxSynchronize())
    assert driver.live().allocations == 0


def test_bf16_and_bool(driver: FakeDriver) -> None:
    brain = driver.tensor(np.zeros(2, dtypes.BF16.numpy))
    assert fields(brain.__dlpack__())[3:] == (4, 16)
    with pytest.raises(AttributeError):
        _ = brain.__cuda_array_interface__
    assert fields(driver.tensor([True, False]).__dlpack__())[3:] == (6, 8)
    with pytest.raises(BufferError, match="bool"):
        driver.tensor([True], capsule_bool=False).__dlpack__()


def test_slices_share_the_memory(driver: FakeDriver) -> None:
    tensor = driver.tensor(np.arange(24).reshape(4, 6), offset=512)
    part = tensor[1:3, ::2]
    assert part.get().tolist() == [[6, 8, 10], [12, 14, 16]]
    assert part.address == tensor.address + 48 == tensor.memory.address + 560
    interface = part.__cuda_array_interface__
    assert (interface["data"], interface["strides"], interface["shape"]) == ((part.address, False), (48, 16), (2, 3))
    assert tensor[2].__cuda_array_interface__["strides"] is None


def test_a_tensor_that_is_written_late(driver: FakeDriver, cuda: Any) -> None:
    driver.delay(0.5)
    writes, reads = (int(done(cuda.cuStreamCreate(1))) for _ in range(2))
    tensor = driver.tensor(np.arange(3), stream=writes)
    assert tensor.peek().tolist() != [0, 1, 2]
    assert tensor.__cuda_array_interface__["stream"] == writes
    tensor.__dlpack__(stream=-1)
    driver.delay(0)
    done(cuda.cuStreamSynchronize(reads))
    assert tensor.peek().tolist() != [0, 1, 2]
    tensor.__dlpack__(stream=reads)
    done(cuda.cuStreamSynchronize(reads))
    assert tensor.peek().tolist() == [0, 1, 2]
    driver.delay(0.02)
    tensor.write([7, 8, 9], writes)
    assert tensor.get().tolist() == [7, 8, 9]
    for stream in (writes, reads):
        done(cuda.cuStreamDestroy(stream))


def test_tensors_without_elements(driver: FakeDriver) -> None:
    tensor = driver.tensor(np.empty((0, 3), np.float32))
    assert tensor.get().shape == (0, 3)
    assert tensor[:, 1:].shape == (0, 2)
