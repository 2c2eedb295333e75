"""Streams and events: of several devices, of other processes, and as users hold them."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import CallerError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import NamedEvent, NamedStream, named, named_stream
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import PATIENCE_S, fails_by


class Protocol:
    """What CUDA's protocol asks for, and nothing else."""

    def __init__(self, handle: int, version: int = 0) -> None:
        self._found = version, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._found


class TorchStream:
    """What torch's streams have, before 2.8; ``_CudaStreamBase`` in its sources."""

    def __init__(self, handle: int, device: int) -> None:
        self.cuda_stream = handle
        self.device = types.SimpleNamespace(type="cuda", index=device)


def of_class(name: str, **attributes: Any) -> Any:
    """Return an object of a class of such a name."""
    return type(name, (), attributes)()


@pytest.mark.parametrize(("number", "handle"), [(0, 1), (1, 1), (2, 2)])
def test_a_default_stream_is_of_whatever_device_is_meant(gpu: CudaRuntime, number: int, handle: int) -> None:
    """0 is what libraries mean by 1; to functions that are bound per thread, it is the thread's own."""
    found = named_stream(number)
    assert found == NamedStream(handle, None)
    assert [found.device_on(gpu, device) for device in (0, 1)] == [0, 1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_default_stream_of_a_library_says_of_which_device_it_is(gpu: CudaRuntime, number: int) -> None:
    streams = [
        TorchStream(number, 1),
        of_class("Stream", ptr=number, device_id=1),
        of_class("ExternalStream", ptr=number, device_id=1),
    ]
    for each in streams:
        found = named_stream(each)
        assert found == NamedStream(number or 1, 1)
        assert found.device_on(gpu, 0) == 1


def test_cupys_streams_that_have_no_device_are_of_the_one_that_is_meant(gpu: CudaRuntime) -> None:
    found = named_stream(of_class("Stream", ptr=0, device_id=-1))
    assert found == NamedStream(1, None)
    assert found.device_on(gpu, 1) == 1


def test_whose_a_stream_is_cuda_knows(gpu: CudaRuntime) -> None:
    stream = gpu.create_stream(1)
    ways = TorchStream(stream, 0), Protocol(stream), of_class("Stream", ptr=stream, device_id=0)
    for value in (stream, np.uint64(stream), *ways):
        found = named_stream(value)
        assert (found, type(found.handle)) == (NamedStream(stream), int)
        assert found.device_on(gpu, 0) == 1
    gpu.destroy_stream(stream, 1)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, "5", 1.0, [5], np.array(5), np.bool_(True), Protocol, TorchStream, threading.Event()),
        of_class("MemoryPointer", ptr=0x1234, device_id=0),
        of_class("Event", ptr=0x1234),
        of_class("CUevent", __int__=lambda _: 0x1234),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_stream_is_refused(value: Any) -> None:
    with pytest.raises(CallerError, match="is no stream of a GPU; expected what has __cuda_stream__"):
        named_stream(value)


@pytest.mark.parametrize(
    "value", [-1, np.int64(-5), Protocol(-1), 2**64, 10**5000], ids=["-1", "numpy", "protocol", "64 bits", "very long"]
)
def test_a_number_that_no_stream_has_is_refused(value: Any) -> None:
    expected = "stream .* is none of CUDA's; expected a number of 0 or more, of 64 bits"
    with pytest.raises(CallerError, match=expected) as error:
        named_stream(value)
    assert len(str(error.value)) < 200


def test_a_stream_that_cuda_does_not_know_is_refused_without_its_number(driver: FakeDriver) -> None:
    driver.fail_next("cuStreamGetCtx", "CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(CallerError, match="none of this process' on a GPU; name one that was made here") as error:
        named_stream(0x1234567).device_on(driver.runtime(), 0)
    assert "1234567" not in str(error.value)
    driver.fail_next("cuStreamGetCtx", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(CudaError):
        named_stream(0x1234567).device_on(driver.runtime(), 0)


# Events


@pytest.mark.parametrize(
    "value",
    [
        of_class("Event", cuda_event=0x1234),  # torch's
        of_class("Event", ptr=0x1234),  # CuPy's
        of_class("Event", handle=0x1234),  # cuda-core's
        of_class("CUevent", __int__=lambda _: 0x1234),
        of_class("cudaEvent_t", __int__=lambda _: 0x1234),
    ],
)
def test_an_event_is_known(value: Any) -> None:
    assert named(value) == (NamedEvent(0x1234),)


def test_several_are_named_in_their_order() -> None:
    event = of_class("Event", ptr=7)
    assert named([5, event, Protocol(6)]) == (NamedStream(5), NamedEvent(7), NamedStream(6))
    assert named((5,)) == named(5) == (NamedStream(5),)
    assert named([]) == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((value, "is no stream of a GPU") for value in ("55", [[5]], [5, None], threading.Event())),
        (Protocol(0x1234, 1), "has __cuda_stream__ of version 1; expected 0"),
        (of_class("Event", cuda_event=0), "was never recorded, and stands for nothing; record it on your stream first"),
    ],
    ids=["text", "lists", "None", "of threads", "newer", "not recorded"],
)
def test_what_cannot_be_named_is_refused(value: Any, text: str) -> None:
    with pytest.raises(CallerError, match=text):
        named(value)


# The real packages


def test_handles_of_the_bindings_are_known(driver: FakeDriver) -> None:
    bindings = driver.bindings()
    assert named(bindings.CUstream(0x1234)) == (NamedStream(0x1234),)
    assert named(bindings.CUevent(0x1234)) == (NamedEvent(0x1234),)


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
def test_cupys_streams_are_known() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.ExternalStream(0x1234, 1)
    assert (stream.ptr, stream.device_id) == (0x1234, 1)
    assert named(stream) == (NamedStream(0x1234),)
    assert named(cupy.cuda.ExternalStream(2, 1)) == (NamedStream(2, 1),)
    assert (cupy.cuda.Stream.__name__, cupy.cuda.Event.__name__) == ("Stream", "Event")
    assert named(cupy.cuda.Stream.null) == (NamedStream(1),)
    assert named(cupy.cuda.Stream.ptds) == (NamedStream(2),)


@pytest.fixture
def stream(gpu: CudaRuntime) -> Iterator[int]:
    stream = gpu.create_stream(1)
    yield stream
    gpu.destroy_stream(stream, 1)


@pytest.fixture
def event(gpu: CudaRuntime) -> Iterator[int]:
    event = gpu.create_event(1)
    yield event
    gpu.destroy_event(event, 1)


@pytest.fixture
def busy(driver: FakeDriver, stream: int) -> Iterator[threading.Event]:
    """Something on the stream, until this is set."""
    finish = threading.Event()
    driver.launch(stream, lambda: finish.wait(PATIENCE_S))
    yield finish
    finish.set()


def waits_for(wait: Callable[[], Any], finish: threading.Event) -> bool:
    """Return whether a call returns when the work is done, and not before."""
    done = threading.Event()

    def wait_for_it() -> None:
        wait()
        done.set()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    has_waited = not done.wait(0.02)
    finish.set()
    thread.join(PATIENCE_S)
    return has_waited and done.is_set()


def test_a_device_is_waited_for_with_all_its_streams(gpu: CudaRuntime, busy: threading.Event) -> None:
    gpu.synchronize_device(0)
    assert waits_for(lambda: gpu.synchronize_device(1), busy)


@pytest.mark.parametrize("default", [0, 1, 2])
def test_our_streams_do_not_wait_for_the_default_ones(
    driver: FakeDriver, gpu: CudaRuntime, stream: int, default: int
) -> None:
    finish = threading.Event()
    with gpu.on(1):
        driver.launch(default, lambda: finish.wait(PATIENCE_S))
    gpu.synchronize_stream(stream, 1)
    finish.set()
    gpu.synchronize_device(1)


def test_an_event_stands_for_what_is_on_the_stream(
    gpu: CudaRuntime, stream: int, event: int, busy: threading.Event
) -> None:
    with gpu.on(1):
        gpu.record(event, stream)
    assert not gpu.is_event_done(event)
    assert waits_for(lambda: gpu.synchronize_event(event), busy)
    assert gpu.is_event_done(event)


def test_an_event_stands_for_all_that_a_device_does(gpu: CudaRuntime, event: int, busy: threading.Event) -> None:
    gpu.record_device(event, 1)
    assert not gpu.is_event_done(event)
    assert waits_for(lambda: gpu.synchronize_event(event), busy)


def test_a_driver_before_12_5_waits_for_the_device(
    driver: FakeDriver, gpu: CudaRuntime, event: int, busy: threading.Event
) -> None:
    gpu._version = 12040
    asked = driver.count("cuCtxRecordEvent")
    assert waits_for(lambda: gpu.record_device(event, 1), busy)
    gpu.synchronize_event(event)
    assert driver.count("cuCtxRecordEvent") == asked


def test_an_event_is_recorded_on_no_stream_of_another_device(gpu: CudaRuntime, event: int) -> None:
    other = gpu.create_stream(0)
    with gpu.on(0), fails_by("CUDA_ERROR_INVALID_HANDLE"):
        gpu.record(event, other)
    gpu.destroy_stream(other, 0)


def test_an_event_that_is_not_shared_is_not_exported(gpu: CudaRuntime, event: int) -> None:
    with fails_by("CUDA_ERROR_INVALID_HANDLE"):
        gpu.export_event(event)


# Streams that are captured into graphs


@pytest.fixture
def captured(driver: FakeDriver, gpu: CudaRuntime, stream: int) -> Iterator[list[str]]:
    """Our stream is being captured by another thread, until the end; then this has how that went."""
    bindings, ended, began, how = driver.bindings(), threading.Event(), threading.Event(), []

    def capture() -> None:
        with gpu.on(1):
            mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            assert not bindings.cuStreamBeginCapture(stream, mode)[0]
            began.set()
            ended.wait(PATIENCE_S)
            how.append(bindings.cuStreamEndCapture(stream)[0].name)

    thread = threading.Thread(target=capture)
    thread.start()
    assert began.wait(PATIENCE_S)
    yield how
    ended.set()
    thread.join(PATIENCE_S)
    assert how == ["CUDA_SUCCESS"], "it was spoiled"


def test_a_stream_that_is_captured_is_known(gpu: CudaRuntime, stream: int, captured: list[str]) -> None:
    with gpu.on(1):
        assert gpu.is_capturing(stream)
        assert [gpu.is_capturing(default) for default in (0, 1, 2)] == [False, False, False]
    assert not captured


def test_what_we_do_meanwhile_neither_fails_nor_spoils_the_graph(gpu: CudaRuntime, captured: list[str]) -> None:
    """By default, no thread may allocate while one captures."""
    address = gpu.allocate(1, 1)
    gpu.free(address, 1)
    event = gpu.create_event(1)
    with gpu.on(1):
        assert gpu.is_event_done(event)
    gpu.destroy_event(event, 1)
    assert not captured


def test_a_threads_mode_of_capturing_is_its_own_again(driver: FakeDriver, gpu: CudaRuntime) -> None:
    bindings = driver.bindings()
    modes = bindings.CUstreamCaptureMode

    def exchange(mode: Any) -> Any:
        return bindings.cuThreadExchangeStreamCaptureMode(mode)[1]

    for mode in (modes.CU_STREAM_CAPTURE_MODE_GLOBAL, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL):
        former = exchange(mode)
        with gpu.on(0), gpu.on(1):
            pass
        assert exchange(former) == mode
