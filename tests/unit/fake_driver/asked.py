"""What these tests ask of the driver, by NVIDIA's own bindings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

PRELUDE = """
import ctypes, os, sys, time
import numpy as np
from tests.unit.fake_driver.asked import done, filled, name_of, primary
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
driver = FakeDriver.load()
cuda = driver.bindings()
primary(cuda, 0)
"""


def done(result: tuple[Any, ...]) -> Any:
    """Return what a function returned beside its error, of which there was none."""
    error, *found = result
    assert not error, error.name
    return found[0] if len(found) == 1 else tuple(found)


def name_of(result: tuple[Any, ...]) -> str:
    """Return the name of a function's error, without the prefix that all have."""
    return str(result[0].name).replace("CUDA_ERROR_", "")


def primary(cuda: Any, device: int) -> Any:
    """Make a device's primary context the thread's."""
    done(cuda.cuInit(0))
    context = done(cuda.cuDevicePrimaryCtxRetain(device))
    done(cuda.cuCtxSetCurrent(context))
    return context


def bytes_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def filled(cuda: Any, kind: str, content: bytes) -> Any:
    handle = getattr(cuda, kind)()
    ctypes.memmove(handle.getPtr(), content, 64)
    return handle


def numbers(driver: FakeDriver, address: object, count: int = 4) -> npt.NDArray[np.int32]:
    """Return what is at an address of a device now."""
    return driver.memory(int(address), (count,), np.int32)  # type: ignore[call-overload]


def in_a_process(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start Python code in a new process, where the fake is the driver and device 0 current for `cuda`."""
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(program), *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told(program: str, *arguments: str, **environment: str) -> str:
    """Return what such code prints."""
    process = in_a_process(program, *arguments, **environment)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    return text.strip()
