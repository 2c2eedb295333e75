"""GPUs that are none, for unit tests: the driver, and what processes have of it. All is given back in the end.

Everything that NVIDIA's bindings do is real but for the driver's library, which is the suite's own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts

__all__ = [
    "BLOCK_BYTES",
    "NOTHING",
    "PATIENCE_S",
    "collect_all",
    "driver",
    "fails_by",
    "gpu",
    "in_another_thread",
    "in_forked_child",
    "peer",
    "run_in_a_process",
    "switching_often",
    "that_nobody_loads",
]

DELAY_S: Final = 0.0002
"""How late everything is that is put on a stream, unless a test says something else."""
PATIENCE_S: Final = 20.0
NOTHING: Final = LiveCounts()


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Two GPUs, of which nothing may be in use when the test is over, and with which nothing undefined may be done."""
    driver = FakeDriver.load()
    driver.forget()
    before = driver.live()  # a test that failed may have left something
    yield driver
    driver.delay(DELAY_S)
    deadline = time.monotonic() + PATIENCE_S
    while driver.live() != before and time.monotonic() < deadline:
        time.sleep(0.001)  # what is freed on a stream is free when the stream comes to it
    assert (driver.live(), driver.violations()) == (before, [])


@pytest.fixture
def gpu(driver: FakeDriver) -> Iterator[CudaRuntime]:
    """CUDA in the process that the memory is of."""
    yield from _runtime(driver, 0)


@pytest.fixture
def peer(driver: FakeDriver) -> Iterator[CudaRuntime]:
    """CUDA in another process."""
    yield from _runtime(driver, 1)


def _runtime(driver: FakeDriver, process: int) -> Iterator[CudaRuntime]:
    before = driver.live(process)
    runtime = driver.runtime(process)
    yield runtime
    collect_all(runtime)
    if driver.live(process) != before:
        gc.collect()  # what only waits for the collector is no leak
        collect_all(runtime)


def collect_all(runtime: CudaRuntime) -> None:
    """Free and unmap what nobody uses any more, when its GPU has finished with it."""
    deadline = time.monotonic() + PATIENCE_S
    while runtime.retired.collect():
        assert time.monotonic() < deadline, "its GPU does not finish with what nobody uses"
        time.sleep(0.001)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let threads change at any line in the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def that_nobody_loads(runtime: CudaRuntime) -> Iterator[CudaAccess]:
    """Yield what would load CUDA, and must not."""
    loaded: list[CudaRuntime] = []

    def load() -> CudaRuntime:
        loaded.append(runtime)
        return runtime

    yield CudaAccess(load)
    assert loaded == []


@contextlib.contextmanager
def fails_by(name: str) -> Iterator[None]:
    """Expect an error of CUDA's."""
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.name == name
    assert f"failed with {name}: " in str(caught.value)


def run_in_a_process(program: str) -> None:
    """Run a program, which succeeds."""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def in_forked_child(work: Callable[[], object]) -> None:
    """Do some work in a forked child, which succeeds and ends in time, with what is registered for its end."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(10, exit=True)
        try:
            work()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"


def in_another_thread(work: Callable[[], Any]) -> Any:
    """Return what some work returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
