"""Which stream is current, and how one waits for another."""

from __future__ import annotations

import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from shm_backend_utils.memory.cuda.runtime import CudaError
from tests.unit.cupy_runtime.fake_cupy import STREAM, FakeCudaCalls, FakeCupy


def test_the_current_stream_is_cupys(cupy: FakeCupy, runtime: CupyRuntime) -> None:
    with cupy.on(STREAM):
        assert runtime.stream_address(runtime.current_stream()) == STREAM


def test_a_stream_waits_for_an_event_of_the_other(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.order(8, 9)
    assert calls.noted == [
        ("eventCreateWithFlags", 2),
        ("eventRecord", 42, 8),
        ("streamWaitEvent", 9, 42),
        ("eventDestroy", 42),
    ]


@pytest.mark.parametrize("failing", ["eventRecord", "streamWaitEvent"])
def test_the_event_is_destroyed_also_if_ordering_fails(
    failing: str, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.failing = failing
    with pytest.raises(CudaError):
        runtime.order(8, 9)
    assert calls.noted[-1] == ("eventDestroy", 42)


def test_a_stream_is_in_order_with_itself(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.order(8, 8)
    assert calls.noted == []
