from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """The fake, of which nothing is left afterwards. A test that does what is undefined looks at it, and forgets it."""
    driver = FakeDriver.load()
    gc.collect()
    driver.forget()
    before = driver.live()
    yield driver
    driver.delay(0.0002)
    gc.collect()
    assert driver.live() == before
    assert driver.violations() == []


@pytest.fixture
def cuda(driver: FakeDriver) -> Iterator[Any]:
    """The bindings in virtual process 0, with device 0 current."""
    yield from _current(driver.bindings(0))


@pytest.fixture
def other(driver: FakeDriver) -> Iterator[Any]:
    """The bindings in virtual process 1, with device 0 current."""
    yield from _current(driver.bindings(1))


def _current(cuda: Any) -> Iterator[Any]:
    with cuda.context(0):
        yield cuda
        cuda.cuCtxSynchronize()
        for device in range(2):
            cuda.cuDevicePrimaryCtxReset(device)
