"""CuPy that is missing or broken, and errors of CUDA: what was being done, and what to do."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from shm_backend_utils.memory.cuda.runtime import CudaError
from tests.unit.cupy_runtime.fake_cupy import (
    EVERY_CALL,
    F32,
    NAMES,
    FakeCudaCalls,
    FakeCudaDriverError,
    FakeCupy,
    FakeOutOfMemoryError,
)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        MachineError, match=r"not installed; install triton-shm-backend-utils\[cuda\], which brings cupy-cuda12x"
    ):
        CupyRuntime()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "raise ImportError('many lines') from ImportError('libcuda.so.1: no file')",
            "imported: libcuda.so.1: no file; ",
        ),
        ("raise ImportError('one line')", "cannot be imported: one line; it must be the CuPy for this machine's CUDA"),
        ("import no_such_module", "CuPy cannot be imported, as it lacks no_such_module; install that"),
    ],
)
def test_a_cupy_that_cannot_be_imported_is_told_from_one_that_is_missing(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cupy.py").write_text(program)
    with pytest.raises(MachineError, match=message):
        CupyRuntime()


def test_making_a_runtime_asks_nothing_of_the_gpu(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    assert calls.noted == []


@pytest.mark.parametrize(("cuda_call", "doing", "ask"), EVERY_CALL, ids=[doing for _, doing, _ in EVERY_CALL])
def test_an_error_of_cuda_says_what_was_being_done(
    cuda_call: str, doing: str, ask: Callable[[CupyRuntime], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.failing = cuda_call
    with pytest.raises(CudaError, match=f"^{doing} failed with cudaErrorIllegalAddress: a kernel has") as caught:
        ask(runtime)
    assert caught.value.name == "cudaErrorIllegalAddress"


@pytest.mark.parametrize(
    ("error", "name"),
    [(FakeCudaDriverError("CUDA_ERROR_X"), "cudaErrorIllegalAddress"), (FakeOutOfMemoryError(), NAMES[2])],
)
def test_errors_of_the_driver_and_of_cupys_pool_have_the_runtimes_names(
    error: Exception, name: str, cupy: FakeCupy, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(cupy, "empty", fail)
    with pytest.raises(CudaError) as caught:
        runtime.empty((2, 3), F32)
    assert caught.value.name == name
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("driver", [{}, {"libcuda.so.1": object()}], ids=["no driver", "a driver without the function"])
def test_what_the_driver_lacks_is_an_old_driver(
    driver: dict[str, Any], runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if name not in driver:
            raise OSError(f"{name}: cannot open shared object file")
        return driver[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(
        CudaError, match="failed with cudaErrorInsufficientDriver: the NVIDIA driver is missing, or old"
    ):
        runtime.extent(9)
