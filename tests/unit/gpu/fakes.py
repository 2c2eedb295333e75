"""GPUs that are none, for unit tests: the driver, CUDA in a model's and a client's process, arrays, streams, kernels.

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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime, whole_blocks
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts

DRIVER: Final = FakeDriver.load()
MODEL: Final = 0
CLIENT: Final = 1
"""Virtual processes: objects of one are to the other what those of another process are."""
SIZE: Final = 1000
BLOCK: Final = whole_blocks(SIZE)
INTEGERS: Final = np.dtype(np.int32)
NOTHING: Final = LiveCounts()
DELAY_S: Final = 0.0002
"""How late everything is that is put on a stream, unless a test says something else."""
PATIENCE_S: Final = 20.0


def left_of(process: int) -> LiveCounts:
    """Return what a virtual process has not given back, but for idle streams, of which a session keeps a few."""
    return DRIVER.live(process)._replace(streams=0)


@contextlib.contextmanager
def runtime_that_gives_all_back(process: int = MODEL) -> Iterator[CudaRuntime]:
    """Give the CUDA of a virtual process, in which nothing is left at the end, and nothing undefined was done."""
    DRIVER.forget()
    before = left_of(process)
    runtime = DRIVER.runtime(process)
    yield runtime
    gc.collect()  # what only waits for the collector is no leak
    collect_all(runtime)
    wait_until(lambda: left_of(process) == before)  # what is freed on a stream is free when the stream comes to it
    assert DRIVER.violations() == []


def collect_all(runtime: CudaRuntime) -> None:
    wait_until(lambda: not runtime.retired.collect())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def that_nobody_loads(runtime: CudaRuntime) -> Iterator[CudaAccess]:
    loaded: list[CudaRuntime] = []

    def load() -> CudaRuntime:
        loaded.append(runtime)
        return runtime

    yield CudaAccess(load)
    assert loaded == []


@contextlib.contextmanager
def fails_by(name: str) -> Iterator[None]:
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.name == name
    assert f"failed with {name}: " in str(caught.value)


class OwnedStream:
    """A stream of a library, which goes with its object."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.handle = runtime.create_stream(0)
        self._runtime = runtime

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __del__(self) -> None:
        self._runtime.destroy_stream(self.handle, 0)


@contextlib.contextmanager
def stream_on(runtime: CudaRuntime, device: int = 0) -> Iterator[int]:
    stream = runtime.create_stream(device)
    yield stream
    runtime.synchronize_stream(stream, device)
    runtime.destroy_stream(stream, device)


@contextlib.contextmanager
def captured(stream: int, device: int = 0) -> Iterator[None]:
    bindings = DRIVER.bindings(MODEL)
    with bindings.context(device):
        relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert not bindings.cuStreamBeginCapture(stream, relaxed)[0]
    yield
    with bindings.context(device):
        error, graph = bindings.cuStreamEndCapture(stream)
        assert not error, error.name
        bindings.cuGraphDestroy(graph)


MODES: Final = ("GLOBAL", "THREAD_LOCAL", "RELAXED")


@contextlib.contextmanager
def captured_elsewhere(mode: str) -> Iterator[int]:
    """Capture a stream, which waits for no default stream, in another thread; the capture must not be ended."""
    bindings = DRIVER.bindings(MODEL)

    def begin() -> int:
        bindings.cuCtxSetCurrent(bindings.cuDevicePrimaryCtxRetain(0)[1])
        stream, name = bindings.cuStreamCreate(1)[1], f"CU_STREAM_CAPTURE_MODE_{mode}"
        error = bindings.cuStreamBeginCapture(stream, getattr(bindings.CUstreamCaptureMode, name))[0]
        assert not error, error.name
        return int(stream)

    def end(stream: int) -> None:
        error, graph = bindings.cuStreamEndCapture(stream)
        bindings.cuStreamDestroy(stream)
        assert not error, error.name
        bindings.cuGraphDestroy(graph)

    with ThreadPoolExecutor(1) as thread:
        stream = thread.submit(begin).result()
        yield stream
        thread.submit(end, stream).result()


@contextlib.contextmanager
def recorded_calls(runtime: CudaRuntime) -> Iterator[list[str]]:
    """Record the driver's functions that this thread calls, in a list, as if GPUs were done whenever they are asked."""
    names, thread, driver = list[str](), threading.get_ident(), runtime._driver

    class Recording:
        def __getattr__(self, name: str) -> Any:
            found = getattr(driver, name)
            if not name.startswith("cu") or threading.get_ident() != thread:
                return found

            def call(*arguments: Any) -> Any:
                names.append(name)
                if name == "cuEventQuery":
                    driver.cuEventSynchronize(*arguments)
                return found(*arguments)

            return call

    runtime._driver = Recording()
    yield names
    runtime._driver = driver


def content(array: Any) -> npt.NDArray[Any]:
    return DRIVER.memory(array.address, array.shape, array.dtype)


class _Owned:
    """Memory that a test has allocated, freed with its last array."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        self.address = runtime.allocate(byte_size, device)
        self._runtime = runtime
        self._device = device

    def __del__(self) -> None:
        self._runtime.retired.add(lambda: self._runtime.free(self.address, self._device))


def array_on(runtime: CudaRuntime, values: npt.ArrayLike, device: int = 0, dtype: Any = np.float32) -> DeviceArray:
    """Return an array on a GPU with these values, with nothing left to wait for."""
    given = np.asarray(values, dtype)
    owned = _Owned(runtime, max(given.nbytes, 1), device)
    array = DeviceArray(runtime, owned.address, given.shape, given.dtype, device, owned)
    content(array)[...] = given
    return array


def kernel(
    stream: int, function: Callable[..., object], *arrays: Any, process: int = MODEL, late_s: float = 0.01
) -> None:
    """Put a function of the arrays' memory on a stream; it begins late, as on a busy GPU."""
    memories = [content(array) for array in arrays]

    def run() -> None:
        time.sleep(late_s)
        function(*memories)

    DRIVER.launch(stream, run, process)


@contextlib.contextmanager
def held_back(stream: int, process: int = MODEL) -> Iterator[threading.Event]:
    finish = threading.Event()
    DRIVER.launch(stream, lambda: finish.wait(PATIENCE_S), process)
    try:
        yield finish
    finally:
        finish.set()


def run_in_a_process(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


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
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
