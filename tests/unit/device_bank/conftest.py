"""A bank of device memory, regions that have some of it, and a model that has a region's memory mapped."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.bank import DeviceBank
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import BLOCK_BYTES, PATIENCE_S, collect_all

__all__ = ["LIMIT", "SHM", "SIZE", "MakeRegion", "Model", "collectors", "eventually"]

SHM = Path("/dev/shm")
SIZE = BLOCK_BYTES
LIMIT = 2 * SIZE

MakeRegion = Callable[..., SlotRegion]


def collectors() -> list[threading.Thread]:
    """Return the threads of banks that wait for models or GPUs."""
    return [thread for thread in threading.enumerate() if thread.name == "shm device memory"]


def eventually(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so, and return whether it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


class Model:
    """What a model has of a region: the device memory, mapped, and the lease that says so."""

    def __init__(self, driver: FakeDriver, runtime: CudaRuntime, region: SlotRegion, device: int = 0) -> None:
        allocation = region.device_memory[device]
        fd = os.open(SHM / region.key, os.O_RDWR)
        lease = use(fd)
        os.close(fd)
        self._driver, self._runtime, self._device = driver, runtime, device
        self.mapping: CudaMapping = CudaMappings(runtime).map(
            allocation.handle, allocation.byte_size, device, "region", lease, allocation.event_handle
        )

    def write(self, value: int) -> None:
        self._driver.memory(self.mapping.address, (SIZE,), np.dtype(np.uint8))[:] = value

    def record(self) -> None:
        """Let the client's event stand for what is to be done on the default stream."""
        with self._runtime.on(self._device):
            self._runtime.record(self.mapping.event, 1)

    def let_go(self) -> None:
        self.mapping.close()
        collect_all(self._runtime)


@pytest.fixture
def bank(gpu: CudaRuntime) -> Iterator[DeviceBank]:
    """A bank from which two of the smallest regions can be provided on each device."""
    with contextlib.closing(DeviceBank(CudaAccess(lambda: gpu), LIMIT)) as bank:
        yield bank
    assert eventually(lambda: not collectors())


@pytest.fixture
def new_region(bank: DeviceBank, peer: CudaRuntime) -> Iterator[MakeRegion]:
    """Make a region with so much memory on these devices; it is destroyed in the end."""
    regions: list[SlotRegion] = []

    def make(devices: tuple[int, ...] = (0,), byte_size: int = SIZE) -> SlotRegion:
        regions.append(SlotRegion(100, 1, PAGE_SIZE, PRIVATE))
        bank.provide(regions[-1], devices, [byte_size] * len(devices))
        return regions[-1]

    yield make
    for region in regions:
        region.destroy()
