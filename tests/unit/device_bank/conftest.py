"""A bank of device memory, and regions that have some of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.bank import DeviceBank
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.device_bank.bank_calls import LIMIT, SIZE, MakeRegion, collectors, eventually


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
