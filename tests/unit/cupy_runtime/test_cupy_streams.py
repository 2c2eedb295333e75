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


def test_a_stream_of_our_own_does_not_wait_for_the_default_one(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.destroy_stream(runtime.create_stream())
    assert calls.noted == [("streamCreateWithFlags", 1), ("streamDestroy", 42)]


@pytest.mark.parametrize(("status", "is_done"), [(0, True), (600, False)], ids=["cudaSuccess", "cudaErrorNotReady"])
def test_an_event_is_looked_at_and_not_waited_for(
    calls: FakeCudaCalls, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch, status: int, is_done: bool
) -> None:
    monkeypatch.setattr(calls, "_eventQuery", lambda _: status, raising=False)
    assert runtime.is_event_done(42) is is_done
    assert calls.noted == [("eventQuery", 42)]


def test_an_event_whose_device_has_failed_is_an_error(
    calls: FakeCudaCalls, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_eventQuery", lambda _: 700, raising=False)
    with pytest.raises(CudaError, match="looking at an event"):
        runtime.is_event_done(42)
