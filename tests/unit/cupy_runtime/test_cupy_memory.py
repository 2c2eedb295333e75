"""Device memory, handles and pinned host memory are asked of CUDA as they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from tests.unit.cupy_runtime.fake_cupy import HANDLE, FakeCudaCalls, FakeCupy


def test_memory_comes_from_plain_malloc_and_never_from_a_pool(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    assert runtime.allocate(4096) == 42
    assert (calls.noted, cupy.worked) == ([("malloc", 4096)], [])


def test_memory_is_freed_when_the_device_is_done(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.free(9)
    assert calls.noted == [("deviceSynchronize",), ("free", 9)]


def test_an_exported_handle_is_its_bytes(runtime: CupyRuntime) -> None:
    assert runtime.export(9) == HANDLE


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_handle_is_opened_as_bytes_with_peer_access(
    kind: Callable[[bytes], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    assert runtime.open(kind(HANDLE)) == 42
    ((_, handle, flags),) = calls.noted
    assert (type(handle), handle, flags) == (bytes, HANDLE, 1)


def test_the_extent_is_that_of_the_whole_allocation(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    assert runtime.extent(0x7F00_0001_2345) == (0x7F00_0001_0000, 1 << 33)
    assert calls.noted[0] == ("free", 0)  # which makes CUDA ready for this thread


def test_host_memory_is_pinned_and_unpinned(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.pin(4096, 8192)
    runtime.unpin(4096)
    assert calls.noted == [("hostRegister", 4096, 8192, 0), ("hostUnregister", 4096)]
