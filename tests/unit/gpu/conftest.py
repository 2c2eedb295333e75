"""CUDA in the processes of a model and of its client. ``tests/conftest.py`` sees that all is given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.fakes import CLIENT, DELAY_S, DRIVER, MODEL, NOTHING, runtime_that_gives_all_back, wait_until


@pytest.fixture(scope="module", autouse=True)
def _begins_with_nothing() -> None:
    """Wait until the garbage of earlier files has left the GPUs."""
    gc.collect()
    wait_until(lambda: DRIVER.live(MODEL) == DRIVER.live(CLIENT) == NOTHING)


@pytest.fixture(autouse=True)
def _does_nothing_undefined() -> Iterator[None]:
    DRIVER.forget()
    yield
    DRIVER.delay(DELAY_S)
    assert DRIVER.violations() == []


@pytest.fixture
def gpu() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as gpu:
        yield gpu


@pytest.fixture
def peer(gpu: CudaRuntime) -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back(CLIENT) as peer:
        yield peer
