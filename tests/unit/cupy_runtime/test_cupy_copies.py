"""Copies between hosts and devices: which are waited for, and what is packed before."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from tests.unit.cupy_runtime.fake_cupy import F32, STREAM, FakeArray, FakeCudaCalls, FakeCupy, host, on_device


def transfers(calls: FakeCudaCalls) -> list[tuple[Any, ...]]:
    """Return what was transferred and waited for: names, and arguments that are no addresses."""
    return [
        (name, *(arguments[2:] if name == "memcpyAsync" else arguments))
        for name, *arguments in calls.noted
        if name in {"memcpyAsync", "streamSynchronize"}
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.bool_, np.int64])
def test_pageable_host_memory_may_be_reused_when_a_copy_returns(
    dtype: npt.DTypeLike, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    there, back = FakeArray(np.zeros((4, 6), dtype)), np.zeros((4, 6), dtype)
    runtime.copy(there, host(4, 6).astype(dtype), STREAM)
    runtime.copy(back, there, STREAM)
    np.testing.assert_array_equal(back, host(4, 6).astype(dtype))
    waited = ("streamSynchronize", STREAM)
    assert transfers(calls) == [
        ("memcpyAsync", back.nbytes, 1, STREAM),
        waited,
        ("memcpyAsync", back.nbytes, 2, STREAM),
        waited,
    ]


def test_copies_from_and_to_pinned_memory_are_not_waited_for(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    array, pinned = on_device(4, 6), host(4, 6)
    calls.pinned = {pinned.ctypes.data}
    runtime.copy(array, pinned, STREAM)
    runtime.copy(pinned, array, STREAM)
    assert transfers(calls) == [("memcpyAsync", 96, 1, STREAM), ("memcpyAsync", 96, 2, STREAM)]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_strided_host_memory_is_packed_and_waited_for(
    is_pinned: bool, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    array, strided, target = on_device(6, 4), host(4, 6).T, np.zeros((6, 8), F32)
    calls.pinned = {strided.ctypes.data, target.ctypes.data} if is_pinned else set()
    runtime.copy(array, strided, STREAM)
    runtime.copy(target[:, ::2], array, STREAM)
    np.testing.assert_array_equal(target[:, ::2], strided)
    np.testing.assert_array_equal(target[:, 1::2], 0)
    assert calls.names().count("streamSynchronize") == 2


def test_strided_device_memory_is_rearranged_on_the_stream(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    wide, back = on_device(4, 12), np.zeros((4, 6), F32)
    runtime.copy(wide[:, ::2], host(4, 6), STREAM)
    runtime.copy(back, wide[:, ::2], STREAM)
    np.testing.assert_array_equal(back, host(4, 6))
    np.testing.assert_array_equal(wide.memory[:, 1::2], 0)
    assert cupy.worked == [("empty", 0, STREAM), ("copyto", 0, STREAM), ("pack", 0, STREAM)]
    assert "setDevice" not in calls.names()


def test_a_cupy_that_knows_no_foreign_streams_has_its_older_class_used(cupy: FakeCupy, runtime: CupyRuntime) -> None:
    cupy.cuda.Stream = object
    cupy.cuda.ExternalStream = cupy.on
    runtime.copy(on_device(4, 6)[:, ::2], on_device(4, 3), STREAM)
    assert cupy.worked == [("copyto", 0, STREAM)]


def test_on_one_device_nothing_is_waited_for(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    target, source = on_device(4, 6), FakeArray(host(4, 6))
    runtime.copy(target, source, STREAM)
    np.testing.assert_array_equal(target.memory, source.memory)
    assert transfers(calls) == [("memcpyAsync", 96, 3, STREAM)]


def test_between_devices_the_devices_are_named_and_nothing_is_waited_for(
    calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    target, source = on_device(4, 6, device=1), FakeArray(host(4, 6))
    runtime.copy(target, source, STREAM)
    np.testing.assert_array_equal(target.memory, source.memory)
    assert calls.noted == [("memcpyPeerAsync", target.data.ptr, 1, source.data.ptr, 0, 96, STREAM)]


def test_strided_memory_of_two_devices_is_rearranged_on_each_one_its_own(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    wide, source = on_device(6, 8, device=1), FakeArray(host(4, 6).T)
    runtime.copy(wide[:, ::2], source, STREAM)
    np.testing.assert_array_equal(wide.memory[:, ::2], source.memory)
    assert cupy.worked == [("pack", 0, 0), ("empty", 1, 0), ("copyto", 1, 0)]
    assert runtime.current_device() == 0
    order = [name for name in calls.names() if name in {"streamSynchronize", "memcpyPeerAsync"}]
    assert order == ["streamSynchronize"] * 3 + ["memcpyPeerAsync"] + ["streamSynchronize"] * 2


@pytest.mark.parametrize(
    ("target", "source"),
    [(on_device(0, 3), host(0, 3)), (host(0, 3), on_device(0, 3)), (on_device(0), on_device(0, device=1))],
)
def test_nothing_is_copied_without_a_call(target: Any, source: Any, calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.copy(target, source, STREAM)
    assert calls.noted == []
