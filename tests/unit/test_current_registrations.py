"""Answers of the server are kept while nothing happens in /dev/shm, and no longer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory import current_registrations
from shm_backend_utils.memory.current_registrations import MOST_NAMES, CurrentRegistrations
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint

FIRST: Final = Registration("/first", 0, 4096)
SECOND: Final = Registration("/second", 0, 4096)


class Watch:
    """Has the news that a test says there is."""

    news = False
    made = 0
    closed = 0
    error: OSError | None = None

    def __init__(self) -> None:
        if Watch.error is not None:
            raise Watch.error
        Watch.made += 1

    def has_news(self) -> bool:
        found, Watch.news = Watch.news, False
        return found

    def close(self) -> None:
        Watch.closed += 1


class Server(StatusEndpoint):
    """Says what a test has registered, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.registered: dict[str, Registration] = {}
        self.asked: list[list[str]] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.after_answer: Callable[[], None] = lambda: None

    def find(self, names: Sequence[str]) -> dict[str, Registration]:
        self.asked.append(list(names))
        self.before_answer()
        found = {name: self.registered[name] for name in names if name in self.registered}
        self.after_answer()
        return found

    def register(self, name: str, what: Registration) -> None:
        self.registered[name] = what
        Watch.news = True

    def unregister(self, name: str) -> None:
        del self.registered[name]
        Watch.news = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {"news": False, "made": 0, "closed": 0, "error": None}.items():
        monkeypatch.setattr(Watch, name, value)
    monkeypatch.setattr(current_registrations, "ObjectWatch", Watch)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def current(server: Server) -> CurrentRegistrations:
    server.register("a", FIRST)
    current = CurrentRegistrations(server)
    current.find(["a"])
    Watch.news = False
    server.asked.clear()
    return current


def test_a_name_is_asked_for_once_while_nothing_happens(server: Server, current: CurrentRegistrations) -> None:
    assert [current.find(["a"]) for _ in range(5)] == [{"a": FIRST}] * 5
    assert server.asked == []
    assert Watch.made == 1


def test_a_name_stands_for_something_else_or_nothing_as_soon_as_it_is_registered_anew(
    server: Server, current: CurrentRegistrations
) -> None:
    server.register("a", SECOND)
    assert [current.find(["a"]) for _ in range(2)] == [{"a": SECOND}] * 2
    assert server.asked == [["a"]]
    server.unregister("a")
    assert current.find(["a"]) == {}
    server.registered["a"] = FIRST
    server.register("b", SECOND)  # news of one name are news of all
    assert current.find(["a"]) == {"a": FIRST}


def test_a_name_that_stands_for_nothing_is_asked_for_each_time(server: Server, current: CurrentRegistrations) -> None:
    for _ in range(3):
        assert current.find(["a", "b"]) == {"a": FIRST}
    assert server.asked == [["a", "b"]] * 3
    server.registered["b"] = SECOND
    assert current.find(["a", "b"]) == {"a": FIRST, "b": SECOND}


@pytest.mark.parametrize("moment", ["before_answer", "after_answer"])
def test_what_changes_while_the_server_answers_is_found_at_the_next_question(
    server: Server, current: CurrentRegistrations, moment: str
) -> None:
    server.register("a", FIRST)
    setattr(server, moment, lambda: server.register("a", SECOND))
    current.find(["a"])
    setattr(server, moment, lambda: None)
    assert current.find(["a"]) == {"a": SECOND}


def test_an_answer_that_comes_after_another_thread_has_seen_the_news_is_not_kept(
    server: Server, current: CurrentRegistrations
) -> None:
    """Both have asked; the name changed after the server had answered the first one, which the second one sees."""
    has_answer, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        server.after_answer = lambda: None
        has_answer.set()
        assert may_go.wait(10)

    server.after_answer = hold
    Watch.news = True
    late = threading.Thread(target=current.find, args=(["a"],))
    late.start()
    assert has_answer.wait(10)
    server.register("a", SECOND)
    assert current.find(["a"]) == {"a": SECOND}
    may_go.set()
    late.join()
    assert current.find(["a"]) == {"a": SECOND}


def test_without_a_watch_every_question_goes_to_the_server_and_the_log_says_so_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    Watch.error = OSError(errno.EMFILE, "no inotify instances left")
    current = CurrentRegistrations(server)
    server.registered["a"] = FIRST
    for _ in range(3):
        assert current.find(["a"]) == {"a": FIRST}
        now += 10
    assert len(server.asked) == 3
    (record,) = caplog.records
    assert record.message.startswith("nothing tells when something happens in /dev/shm (")
    now -= 10
    Watch.error = None  # somebody has closed one, but not every request tries for it
    current.find(["a"])
    assert Watch.made == 0
    now += 10
    assert [current.find(["a"]) for _ in range(3)] == [{"a": FIRST}] * 3
    assert (len(server.asked), Watch.made) == (5, 1)


def test_no_answer_keeps_nothing(server: Server, current: CurrentRegistrations) -> None:
    def fail() -> None:
        raise MachineError("the server does not answer")

    Watch.news = True
    server.before_answer = fail
    for _ in range(2):
        with pytest.raises(MachineError):
            current.find(["a"])
    server.before_answer = lambda: None
    assert current.find(["a"]) == {"a": FIRST}


def test_what_is_kept_has_a_bound(server: Server, current: CurrentRegistrations) -> None:
    for number in range(3 * MOST_NAMES):
        server.registered[str(number)] = FIRST
        current.find([str(number)])
        assert len(current._answers) <= MOST_NAMES


def test_a_close_forgets_everything_and_what_follows_begins_anew(server: Server, current: CurrentRegistrations) -> None:
    current.close()
    current.close()
    assert Watch.closed == 1
    server.registered["a"] = SECOND
    assert current.find(["a"]) == {"a": SECOND}
    assert Watch.made == 2


def test_a_forked_child_begins_anew_whoever_held_the_lock(server: Server, current: CurrentRegistrations) -> None:
    server.registered["a"] = SECOND
    with current._lock:
        child = os.fork()
        if not child:
            os._exit(0 if current.find(["a"]) == {"a": SECOND} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert current.find(["a"]) == {"a": FIRST}
