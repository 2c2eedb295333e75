"""What tests need around the events of a fake GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

from shm_backend_utils.memory.cuda.events import Event, EventListener
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

__all__ = ["PATIENCE_S", "live_events", "live_streams", "unfinished_work", "wait_on_host"]

PATIENCE_S = 20.0


def live_events(cuda: FakeCuda) -> int:
    """Return how many events a runtime has made or opened, and not destroyed."""
    return len(cuda._events)


def live_streams(cuda: FakeCuda) -> int:
    """Return how many streams a runtime has made for the library, and not destroyed."""
    noted = [name for name, _ in cuda.log]
    return noted.count("create_stream") - noted.count("destroy_stream")


def wait_on_host(listener: EventListener, events: Iterable[Event]) -> None:
    """Wait until events of other processes are done."""
    deadline = time.monotonic() + PATIENCE_S
    with listener.watching(events) as are_done:
        while not are_done():
            assert time.monotonic() < deadline
            time.sleep(0.001)


@contextlib.contextmanager
def unfinished_work(cuda: FakeCuda, done: list[str]) -> Iterator[threading.Event]:
    """Put work on the current stream that a GPU would take long for: until the event is set, at the latest at the end.

    When it is done, it adds "work" to the list.
    """
    finish = threading.Event()
    stream = cuda.current_stream()

    def work() -> None:
        assert finish.wait(PATIENCE_S)
        done.append("work")

    cuda.launch(stream, work)
    try:
        yield finish
    finally:
        finish.set()
        stream.drain()
