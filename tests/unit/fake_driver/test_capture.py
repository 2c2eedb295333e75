"""Capture of streams: what is not allowed meanwhile fails, as CUDA's documents say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of


@pytest.fixture(params=[0, 1])
def stream(cuda: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    stream = done(cuda.cuStreamCreate(request.param))
    yield stream
    cuda.cuStreamEndCapture(stream)
    done(cuda.cuStreamDestroy(stream))


def begin(cuda: Any, stream: Any, mode: str = "GLOBAL") -> None:
    done(cuda.cuStreamBeginCapture(stream, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")))


def test_what_is_captured_is_not_done(cuda: Any, driver: FakeDriver, stream: Any) -> None:
    order: list[str] = []
    begin(cuda, stream)
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 1
    assert int(done(cuda.cuStreamGetCaptureInfo(stream))[0]) == 1
    driver.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuGraphDestroy(done(cuda.cuStreamEndCapture(stream))))
    done(cuda.cuStreamSynchronize(stream))
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 0
    assert order == []


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuMemAlloc"])
def test_what_would_wait_or_allocate_spoils_the_capture(cuda: Any, stream: Any, call: str) -> None:
    begin(cuda, stream)
    arguments = {"cuCtxSynchronize": (), "cuMemAlloc": (4,)}.get(call, (stream,))
    assert name_of(getattr(cuda, call)(*arguments)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert name_of(cuda.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"


def test_relaxed_captures_let_others_allocate(cuda: Any, stream: Any) -> None:
    begin(cuda, stream, "RELAXED")
    done(cuda.cuMemFree(done(cuda.cuMemAlloc(4))))
    done(cuda.cuStreamEndCapture(stream))


def test_events_of_a_capture(cuda: Any, stream: Any) -> None:
    outside, event, second = done(cuda.cuEventCreate(2)), done(cuda.cuEventCreate(2)), done(cuda.cuStreamCreate(1))
    begin(cuda, stream)
    done(cuda.cuEventRecord(event, stream))
    assert name_of(cuda.cuEventQuery(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuStreamWaitEvent(stream, outside, 0)) == "STREAM_CAPTURE_ISOLATION"
    done(cuda.cuStreamWaitEvent(second, event, 0))  # it joins
    assert int(done(cuda.cuStreamIsCapturing(second))) == 1
    done(cuda.cuStreamEndCapture(stream))
    assert int(done(cuda.cuStreamIsCapturing(second))) == 0
    for one in (outside, event):
        done(cuda.cuEventDestroy(one))
    done(cuda.cuStreamDestroy(second))


def test_the_legacy_stream_beside_a_capturing_blocking_one(cuda: Any, driver: FakeDriver) -> None:
    stream, event = done(cuda.cuStreamCreate(0)), done(cuda.cuEventCreate(2))
    begin(cuda, stream, "RELAXED")
    assert name_of(cuda.cuEventRecord(event, 0)) == "STREAM_CAPTURE_IMPLICIT"
    assert name_of(cuda.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert name_of(cuda.cuStreamBeginCapture(0, cuda.CUstreamCaptureMode(0))) == "STREAM_CAPTURE_UNSUPPORTED"
    done(cuda.cuEventDestroy(event))
    done(cuda.cuStreamDestroy(stream))
