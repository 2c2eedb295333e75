"""An interrupt at any line of a client's call on GPUs: nothing is left there, and the next call is right."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.client_on_gpus.conftest import gpu_client, on_host, tensor_of
from tests.unit.client_on_gpus.gpu_server import GpuServer

PACKAGE = Path(shm_backend_utils.__file__).parent
INTERRUPTED = tuple(
    str(PACKAGE / each)
    for each in (
        *("client/paths/on_gpus.py", "client/paths/taking.py", "client/inputs/devices.py"),
        *("memory/cuda/allocations.py", "memory/cuda/bank.py", "memory/cuda/ordering.py"),
    )
)
TAKEN_OVER = {"_give_up", "keep_while", "<lambda>"}
"""Where banks take memory over: an interrupt there may lose it; what it must not do is device_bank's to test."""
X = np.arange(600, dtype=np.float32)
ON_GPU = {"OUT0": (X.shape, X.dtype, "cuda:0")}


def is_with(frame: FrameType) -> bool:
    """Return whether the line is one of a `with`: no signal comes between its block and what ends it."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def interrupted_at(line: int, work: Callable[[], object]) -> str:
    """Do work that is interrupted at the n-th line that it comes to, of the files above; return which that was."""
    count, where = 0, ""

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, where
        if not frame.f_code.co_filename.startswith(INTERRUPTED) or frame.f_code.co_name in TAKEN_OVER:
            return None
        if event == "line" and not is_with(frame):
            count += 1
            if count == line:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in a finalizer is swallowed by Python, and must not be kept, with all its frames, by others."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@pytest.mark.parametrize("way", ["lent", "copied", "prepared"])
def test_an_interrupt_at_any_line_leaves_nothing_and_the_next_call_is_right(
    driver: FakeDriver, server: GpuServer, cuda: CudaAccess, way: str
) -> None:
    driver.delay(0)
    x = tensor_of(driver, X, kind="pool" if way == "copied" else "device")

    with gpu_client(server, cuda, lend_bytes=0) as client:

        def work() -> None:
            if way == "prepared":
                with client.prepare("m", {"IN0": x}, outputs=ON_GPU) as call:
                    on_host(call.infer())
            else:
                on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU))

        line, where = 1, "begin"
        while where:
            where = interrupted_at(line, work)
            found = on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU))
            np.testing.assert_array_equal(found, 2 * X, err_msg=where)
            line += 1
