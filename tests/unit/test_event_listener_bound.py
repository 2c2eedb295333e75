"""Events that a client keeps open: a bounded number, and never one that it waits for is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from shm_backend_utils.memory.cuda.events import Event, EventListener, EventRecorder
from tests.unit.fake_gpu_events import live_events, wait_on_host

from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.cuda import events
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import runtime_that_gives_all_back

LONG_S = 30.0


@pytest.fixture
def model() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def client() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_OPEN", 4)


def of_models_loaded_anew(model: FakeCuda, count: int) -> Iterator[tuple[EventRecorder, Event]]:
    for _ in range(count):
        recorder = EventRecorder(model)
        yield recorder, recorder.record(0)


def test_events_without_end_leave_a_bounded_number_open(model: FakeCuda, client: FakeCuda) -> None:
    listener = EventListener(client)
    for _, event in of_models_loaded_anew(model, 50):
        wait_on_host(listener, [event])
        assert live_events(client) <= 4
    del listener
    assert live_events(client) == 0


def test_the_event_that_was_used_longest_ago_is_closed(
    model: FakeCuda, client: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = EventListener(client)
    opened: list[bytes] = []
    open_event = client.open_event

    def noted(handle: bytes) -> int:
        opened.append(handle)
        return open_event(handle)

    monkeypatch.setattr(client, "open_event", noted)
    recorders, recorded = zip(*of_models_loaded_anew(model, 5), strict=True)
    for event in recorded:
        wait_on_host(listener, [event, recorded[0]])  # that one is used all the time
    opened.clear()
    wait_on_host(listener, [recorded[0], *recorded[2:]])
    assert opened == []
    wait_on_host(listener, [recorded[1]])
    assert opened == [recorded[1].handle]
    del recorders


def test_an_event_that_was_closed_is_opened_again_and_waited_for(model: FakeCuda, client: FakeCuda) -> None:
    listener = EventListener(client)
    kept = list(of_models_loaded_anew(model, 10))
    for _ in range(2):
        for _, event in kept:
            wait_on_host(listener, [event])
    assert live_events(client) == 4


def test_an_event_that_is_waited_for_is_not_closed_meanwhile(
    model: FakeCuda, client: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list(of_models_loaded_anew(model, 10))
    waits, goes_on = threading.Event(), threading.Event()
    wait_for_event = client.wait_for_event

    def wait_long(address: int, stream: int) -> None:
        if not waits.is_set():
            waits.set()
            assert goes_on.wait(LONG_S)
        wait_for_event(address, stream)  # raises if it was destroyed

    monkeypatch.setattr(client, "wait_for_event", wait_long)
    listener = EventListener(client)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            wait_on_host(listener, [kept[0][1]])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(LONG_S)
    for _, event in kept[1:]:
        wait_on_host(listener, [event])
    goes_on.set()
    thread.join()
    assert errors == []
    assert live_events(client) == 4


def test_an_event_of_another_handle_is_not_taken_for_one_that_is_open(model: FakeCuda, client: FakeCuda) -> None:
    """Events are told apart by GPU and handle, and one that is none is an error, also beside one that is known."""
    listener = EventListener(client)
    ((_, event),) = of_models_loaded_anew(model, 1)
    wait_on_host(listener, [event])
    with pytest.raises(PeerError):
        wait_on_host(listener, [event._replace(device_uuid="0" * 32)])
    with pytest.raises(PeerError):
        wait_on_host(listener, [event._replace(handle=bytes(64))])
