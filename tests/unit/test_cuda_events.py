"""Interprocess events, on the fake GPU: who records them, who waits, and what becomes of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from shm_backend_utils.memory.cuda.events import Event, EventListener, EventRecorder
from tests.unit.fake_gpu_events import PATIENCE_S, live_events, live_streams, unfinished_work, wait_on_host

from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.cuda.memory import CudaMappings, device_of
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, device_guard
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel
from tests.unit.fake_gpu import BYTES, fails_by, runtime_that_gives_all_back

Wait = Callable[[EventListener, Iterable[Event]], None]

either_way = pytest.mark.parametrize("wait", [EventListener.wait_on_streams, wait_on_host], ids=["stream", "host"])


@pytest.fixture
def model() -> Iterator[FakeCuda]:
    """What the process has that records."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def client() -> Iterator[FakeCuda]:
    """What the process has that waits."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def recorder(model: FakeCuda) -> EventRecorder:
    return EventRecorder(model)


@pytest.fixture
def listener(client: FakeCuda) -> EventListener:
    return EventListener(client)


def noted(cuda: FakeCuda, *operations: str) -> list[tuple[str, object]]:
    return [(name, detail) for name, detail in cuda.log if name in operations]


def current_stream(cuda: FakeCuda, device: int) -> int:
    with device_guard(cuda, device):
        return cuda.current_stream().ptr


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S / 2  # before the work that is unfinished ends by itself
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Recording


def test_an_event_is_told_by_its_gpu_and_a_handle_of_cudas_length(model: FakeCuda, recorder: EventRecorder) -> None:
    event = recorder.record(1)
    assert event.device_uuid == model.device_uuid(1)
    assert len(event.handle) == HANDLE_LENGTH


@pytest.mark.parametrize("device", [0, 1])
def test_what_is_recorded_is_the_current_stream_of_the_device(
    model: FakeCuda, recorder: EventRecorder, device: int
) -> None:
    recorder.record(device)
    with device_guard(model, device):
        stream = model.stream()
    with stream:
        recorder.record(device)
    assert noted(model, "record") == [("record", current_stream(model, device)), ("record", stream.ptr)]


def test_recording_waits_for_nothing(model: FakeCuda, recorder: EventRecorder) -> None:
    with unfinished_work(model, []) as finish:
        recorder.record(0)
        assert not finish.is_set()
    assert noted(model, "synchronize", "is_event_done") == []


def test_a_stream_has_one_event_however_often_it_is_recorded(model: FakeCuda, recorder: EventRecorder) -> None:
    assert len({recorder.record(0) for _ in range(3)}) == 1
    assert live_events(model) == 1


def test_every_stream_of_every_device_has_an_event_of_its_own(model: FakeCuda, recorder: EventRecorder) -> None:
    events = {recorder.record(0), recorder.record(1)}
    with model.stream():
        events.add(recorder.record(0))
    assert len(events) == 3


def test_events_go_with_their_recorder(model: FakeCuda) -> None:
    recorder = EventRecorder(model)
    recorder.record(0)
    recorder.record(1)
    assert live_events(model) == 2
    del recorder
    assert live_events(model) == 0


def test_an_event_that_cannot_be_destroyed_disturbs_no_other(model: FakeCuda) -> None:
    recorder = EventRecorder(model)
    recorder.record(0)
    recorder.record(1)
    model.fail_next("destroy_event", "cudaErrorIllegalAddress")
    del recorder
    assert live_events(model) == 1
    for left in list(model._events):
        model.destroy_event(left)


@pytest.mark.parametrize(
    "method",
    ["current_device", "set_device", "current_stream", "create_event", "device_uuid", "export_event", "record"],
)
def test_what_cannot_be_recorded_leaves_nothing_and_may_be_tried_again(
    model: FakeCuda, recorder: EventRecorder, method: str
) -> None:
    model.fail_next(method, "cudaErrorNotSupported")
    with fails_by("cudaErrorNotSupported"):
        recorder.record(1)
    assert recorder.record(1).device_uuid == model.device_uuid(1)
    assert live_events(model) == 1


# Waiting


def test_what_a_stream_does_next_comes_after_the_other_process_work_and_the_host_does_not_wait(
    model: FakeCuda, client: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    done: list[str] = []
    with unfinished_work(model, done) as finish:
        event = recorder.record(0)
        listener.wait_on_streams([event])
        assert not finish.is_set()
        client.launch(client.current_stream(), lambda: done.append("the user's"))
        finish.set()
        client.synchronize(client.current_stream().ptr)
    assert done == ["work", "the user's"]
    assert noted(client, "is_event_done") == []


def test_the_host_waits_if_it_is_told_to(
    model: FakeCuda, client: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    done: list[str] = []
    with unfinished_work(model, done) as finish:
        event = recorder.record(0)
        finish.set()
        wait_on_host(listener, [event])
        assert done == ["work"]
    assert ("wait_for_event", client.current_stream().ptr) not in client.log


def test_the_host_waits_for_what_was_recorded_when_it_began_and_not_for_what_others_record(
    model: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    """A model has one event for a stream, and records it for every call."""
    done: list[str] = []
    event = recorder.record(0)
    with listener.watching([event]) as are_done, unfinished_work(model, done):
        assert recorder.record(0) == event
        wait_until(are_done)
        assert done == []


def test_a_wait_that_takes_long_holds_up_no_other(
    model: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    with unfinished_work(model, []), listener.watching([recorder.record(0)]) as is_slow_done:
        with model.stream():
            quick = recorder.record(0)
        with listener.watching([quick]) as is_quick_done:
            wait_until(is_quick_done)
        assert not is_slow_done()


def test_waits_for_one_event_do_not_disturb_each_other(
    model: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    event = recorder.record(0)
    with listener.watching([event]) as is_first_done, unfinished_work(model, []) as finish:
        recorder.record(0)
        with listener.watching([event]) as is_second_done:
            wait_until(is_first_done)
            assert not is_second_done()
            finish.set()
            wait_until(is_second_done)


def test_all_events_of_all_devices_must_be_done(
    model: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    with model.stream() as quick:
        ended = recorder.record(0)
    quick.drain()
    with device_guard(model, 1), unfinished_work(model, []) as finish:
        unfinished = recorder.record(1)
        with listener.watching([ended, unfinished]) as first, listener.watching([unfinished, ended]) as second:
            wait_on_host(listener, [ended])
            assert not first()
            assert not second()
            finish.set()
            wait_until(first)
            wait_until(second)


def test_a_wait_ends_with_its_block_and_waits_for_nothing_then(
    model: FakeCuda, client: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    done: list[str] = []
    with unfinished_work(model, done):
        with listener.watching([recorder.record(0)]) as are_done:
            assert (live_events(client), live_streams(client)) == (2, 1)
            assert not are_done()
        assert done == []
    assert (live_events(client), live_streams(client)) == (1, 0)
    assert noted(client, "synchronize") == []


@pytest.mark.parametrize("method", ["create_stream", "create_event", "wait_for_event", "record", "is_event_done"])
def test_a_wait_that_fails_leaves_nothing(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener, method: str
) -> None:
    client.fail_next(method, "cudaErrorIllegalAddress")
    with fails_by("cudaErrorIllegalAddress"):
        wait_on_host(listener, [recorder.record(1)])
    assert (live_events(client), live_streams(client)) == (1, 0)
    assert client.current_device() == 0


@pytest.mark.parametrize("left", ["destroy_event", "destroy_stream"])
def test_what_cannot_be_destroyed_after_a_wait_is_no_error_and_keeps_nothing_else(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener, left: str
) -> None:
    client.fail_next(left, "cudaErrorIllegalAddress")
    wait_on_host(listener, [recorder.record(0)])
    assert (live_events(client) - 1, live_streams(client)) == ((1, 0) if left == "destroy_event" else (0, 1))


def test_a_forked_child_leaves_its_parents_waits_alone(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listener.watching([recorder.record(0)]):
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        noticed: list[str] = []
        monkeypatch.setattr(client, "current_device", lambda: noticed.append("CUDA"))
    monkeypatch.undo()
    assert noticed == []


def test_the_stream_that_waits_is_the_users_current_one_of_that_device(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    with client.stream() as users:
        listener.wait_on_streams([recorder.record(0), recorder.record(1)])
    assert noted(client, "wait_for_event") == [
        ("wait_for_event", users.ptr),
        ("wait_for_event", current_stream(client, 1)),
    ]


@either_way
def test_a_device_is_found_by_its_uuid_whatever_its_number(
    model: FakeCuda, recorder: EventRecorder, wait: Wait
) -> None:
    client = FakeCuda(uuids=[model.device_uuid(1), model.device_uuid(0)])
    listener = EventListener(client)
    wait(listener, [recorder.record(1)])
    assert noted(client, "set_device") == []  # its number is 0 here, and that is current
    wait(listener, [recorder.record(0)])
    moves = noted(client, "set_device")
    assert moves == [("set_device", 1), ("set_device", 0)] * (len(moves) // 2) != []


def test_without_events_nothing_is_waited_for(client: FakeCuda, listener: EventListener) -> None:
    listener.wait_on_streams([])
    wait_on_host(listener, [])
    assert client.log == []


@either_way
def test_an_event_is_opened_once_however_often_it_is_waited_for(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener, wait: Wait
) -> None:
    for _ in range(3):
        wait(listener, [recorder.record(0), recorder.record(1)])
    assert live_events(client) == 2


def test_threads_that_wait_at_once_open_once(recorder: EventRecorder) -> None:
    threads = 4
    arrived = threading.Barrier(threads)
    both_opening = threading.Barrier(2)
    met: list[str] = []

    class MeetingCuda(FakeCuda):
        """Waits, when it opens, for a second thread to do the same, which should not come."""

        def open_event(self, handle: bytes) -> int:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_opening.wait(0.2)
                met.append("two threads that open")
            return super().open_event(handle)

    event = recorder.record(0)
    client = MeetingCuda()
    listener = EventListener(client)

    def wait(_: int) -> None:
        arrived.wait()
        wait_on_host(listener, [event])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(wait, range(threads)))
    assert met == []
    assert live_events(client) == 1


def test_opened_events_go_with_their_listener(client: FakeCuda, recorder: EventRecorder) -> None:
    listener = EventListener(client)
    wait_on_host(listener, [recorder.record(0), recorder.record(1)])
    assert live_events(client) == 2
    del listener
    assert live_events(client) == 0


def test_events_are_destroyed_on_their_own_devices(model: FakeCuda, client: FakeCuda) -> None:
    recorder, listener = EventRecorder(model), EventListener(client)
    wait_on_host(listener, [recorder.record(1)])
    del model.log[:], client.log[:]
    del recorder, listener
    there_and_back: list[tuple[str, object]] = [("set_device", 1), ("set_device", 0)]
    assert noted(model, "set_device") == noted(client, "set_device") == there_and_back


# Refusing


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda event: event._replace(handle=bytes(HANDLE_LENGTH)), "cudaErrorInvalidValue"),
        (lambda event: event._replace(handle=b"\xff" * HANDLE_LENGTH), "cudaErrorInvalidValue"),
        (lambda event: event._replace(device_uuid="0" * 32), "a GPU that this .* does not see"),
        (lambda event: event._replace(device_uuid=""), "a GPU that this .* does not see"),
    ],
    ids=["zeros", "no handle", "another GPU", "no GPU"],
)
@either_way
def test_what_is_no_event_of_this_machine_is_the_peers_fault(
    recorder: EventRecorder, listener: EventListener, wait: Wait, spoil: Callable[[Event], Event], reason: str
) -> None:
    event = spoil(recorder.record(0))
    with pytest.raises(PeerError, match=f"the model's CUDA event cannot be waited for: .*{reason}") as caught:
        wait(listener, [event])
    assert event.handle.hex() not in str(caught.value)
    assert repr(event.handle) not in str(caught.value)


@either_way
def test_an_event_that_its_owner_has_destroyed_is_the_peers_fault(
    model: FakeCuda, listener: EventListener, wait: Wait
) -> None:
    recorder = EventRecorder(model)
    event = recorder.record(0)
    del recorder
    with pytest.raises(PeerError, match="cudaErrorInvalidResourceHandle"):
        wait(listener, [event])


@pytest.mark.parametrize("method", ["device_count", "device_uuid", "current_device", "open_event"])
@either_way
def test_an_event_that_cannot_be_opened_may_be_tried_again(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener, wait: Wait, method: str
) -> None:
    event = recorder.record(0)
    client.fail_next(method, "cudaErrorUnknown")
    with pytest.raises(PeerError, match="cannot be waited for: .*cudaErrorUnknown"):
        wait(listener, [event])
    wait(listener, [event])


def test_what_fails_when_it_is_waited_for_is_cudas_error(
    client: FakeCuda, recorder: EventRecorder, listener: EventListener
) -> None:
    client.fail_next("wait_for_event", "cudaErrorIllegalAddress")
    with fails_by("cudaErrorIllegalAddress"):
        listener.wait_on_streams([recorder.record(1)])
    assert client.current_device() == 0


# Two processes


MODEL = """
import sys
import numpy as np
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.cuda.events import EventRecorder
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel

cuda = FakeCuda()
recorder = EventRecorder(cuda)
allocation = CudaAllocation(cuda, 1, 0)
array = allocation.array_at(0, np.dtype(np.uint8), (1,), 1)
array.fill(1)
cuda.synchronize(cuda.current_stream().ptr)

def write(memory):
    sys.stdin.readline()
    memory.fill(42)

kernel(write, array)
event = recorder.record(0)
print(event.device_uuid, event.handle.hex(), allocation.handle.hex(), flush=True)
cuda.synchronize(cuda.current_stream().ptr)
sys.stdin.read()
"""


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[str]]:
    """A model that has told its event and its memory, in which 42 appears when a line has come and its work is done."""
    with subprocess.Popen(
        [sys.executable, "-c", MODEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def told_by(process: subprocess.Popen[str]) -> tuple[Event, bytes]:
    assert process.stdout is not None
    uuid, event, memory = process.stdout.readline().split()
    return Event(uuid, bytes.fromhex(event)), bytes.fromhex(memory)


def test_the_work_of_another_process_is_waited_for_on_the_stream(
    client: FakeCuda, listener: EventListener, other_process: subprocess.Popen[str]
) -> None:
    event, memory = told_by(other_process)
    mapping = CudaMappings(client).map(memory, 1, device_of(client, event.device_uuid, "memory"), "memory")
    array = mapping.array_at(0, BYTES, (1,), 1)
    assert array is not None
    seen: list[int] = []

    def look(memory: np.ndarray) -> None:
        seen.append(int(memory[0]))

    kernel(look, array)
    client.synchronize(client.current_stream().ptr)
    listener.wait_on_streams([event])
    kernel(look, array)
    assert other_process.stdin is not None
    print(file=other_process.stdin, flush=True)
    client.synchronize(client.current_stream().ptr)
    assert seen == [1, 42]


@either_way
def test_an_event_of_a_killed_process_is_the_peers_fault(
    listener: EventListener, other_process: subprocess.Popen[str], wait: Wait
) -> None:
    event, _ = told_by(other_process)
    other_process.kill()
    other_process.wait()
    with pytest.raises(PeerError, match="cudaErrorInvalidResourceHandle"):
        wait(listener, [event])
