"""CuPy's runtime, over a fake of CuPy that notes what it is asked for."""

from __future__ import annotations

import ctypes
import sys

import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from tests.unit.cupy_runtime.fake_cupy import FakeCudaCalls, FakeCupy, FakeDriver


@pytest.fixture
def calls() -> FakeCudaCalls:
    return FakeCudaCalls()


@pytest.fixture
def cupy(calls: FakeCudaCalls, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(calls)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": FakeDriver()}.__getitem__)
    return fake


@pytest.fixture
def runtime(cupy: FakeCupy) -> CupyRuntime:
    return CupyRuntime()
