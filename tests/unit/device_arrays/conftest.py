"""Two GPUs of the fake driver, whose streams are late."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.device_arrays.gpu import Gpu

DELAY_S = 0.002


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    driver = FakeDriver.load()
    before = driver.live()
    assert before == LiveCounts()
    gpu = Gpu(driver, driver.runtime())
    driver.delay(DELAY_S)
    yield gpu
    driver.delay(0)
    gpu.close()
    if driver.live() != LiveCounts():
        gc.collect()
    assert driver.violations() == []
    assert driver.live() == LiveCounts()
    driver.forget()
