from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.fake_driver.asked import primary

pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """The fake, of which nothing is left afterwards. A test that does what is undefined looks at it, and forgets it."""
    driver = FakeDriver.load()
    driver.forget()
    yield driver
    driver.delay(0.0002)
    gc.collect()
    assert driver.live() == LiveCounts()
    assert driver.violations() == []


@pytest.fixture
def cuda(driver: FakeDriver) -> Iterator[Any]:
    """The bindings in virtual process 0, with device 0 current."""
    cuda = driver.bindings(0)
    primary(cuda, 0)
    yield cuda
    cuda.cuCtxSynchronize()
    for device in range(2):
        cuda.cuDevicePrimaryCtxReset(device)
    while not cuda.cuCtxPopCurrent()[0]:
        pass


@pytest.fixture
def other(driver: FakeDriver) -> Iterator[Any]:
    """The bindings in virtual process 1, with device 0 current."""
    other = driver.bindings(1)
    primary(other, 0)
    yield other
    other.cuCtxSynchronize()
    other.cuDevicePrimaryCtxReset(0)
    while not other.cuCtxPopCurrent()[0]:
        pass
