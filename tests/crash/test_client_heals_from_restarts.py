"""The server is killed and comes back, with its registrations lost, under a client that goes on calling."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.processes import read_if_there
from shm_backend_utils.client import DeadlineExceededError, ServerUnavailableError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ShmError, TensorError
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..e2e.eventually import eventually
from ..e2e.flavours import FLAVOURS, AnyClient, client_of, url_of
from .registered import SomebodyElse

X = np.arange(1000, dtype=np.float32)
HINTS = {"OUTPUT0": X.nbytes}
SHARED_PATHS: tuple[PathName, ...] = ("direct", "triton-shm")
CALLERS_OF_EACH_CLIENT = 4
FIVE_CALLS_LATER = 5
PATIENCE_S = 30.0
LENGTH = 2000


class Caller:
    """A thread that calls `identity` again and again, each time with other values, and keeps what came of it."""

    def __init__(self, client: AnyClient, path: PathName, number: int) -> None:
        self.answered = 0
        self.failed = 0
        self.wrong: list[str] = []
        self._client = client
        self._path = path
        self._number = number
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def wait_for_answer(self) -> None:
        """Return when a call that begins after now was answered."""
        seen = self.answered
        self._wait(lambda: self.answered > seen + 1)

    def wait_for_failure(self) -> None:
        self._wait(lambda: self.failed > 0)

    def end(self) -> None:
        self._is_over = True
        self._thread.join()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(is_so, PATIENCE_S), f"{self.answered} answered, {self.failed} failed"

    def _call(self) -> None:
        value = self._number
        while not self._is_over:
            value += 1000
            answered = self._call_with(np.full(LENGTH, value, np.float32))
            with self._news:
                self.answered += answered
                self.failed += not answered
                self._news.notify_all()
            if not answered:
                time.sleep(0.05)  # nobody answers for seconds: leave the cores to the server that is to come

    def _call_with(self, x: np.ndarray[tuple[int], np.dtype[np.float32]]) -> bool:
        hints = {"OUTPUT0": x.nbytes}
        try:
            with self._client.infer("identity", {"INPUT0": x}, outputs=hints, path=self._path) as result:
                if not np.array_equal(result["OUTPUT0"], x):
                    self.wrong.append("a result is not what was asked for")
        except ShmError:
            return False
        except BaseException as error:  # the test reads it
            self.wrong.append(repr(error))
            return False
        return True


@contextlib.contextmanager
def busy(client: AnyClient, paths: Sequence[PathName], count: int) -> Iterator[list[Caller]]:
    """Keep so many callers busy, on these paths in turn, until the block ends."""
    callers = [Caller(client, paths[number % len(paths)], number) for number in range(count)]
    try:
        yield callers
    finally:
        for caller in callers:
            caller.end()


class Story:
    """A server dies and comes back. Each flavour has three clients of it.

    One is busy all the while, one calls while there is no server, and one does not call meanwhile.
    """

    def __init__(self, mortal: MortalServer) -> None:
        with contextlib.ExitStack() as stack:

            def client_of_each() -> dict[str, AnyClient]:
                return {
                    flavour: stack.enter_context(client_of(flavour, url_of(mortal.server, flavour), timeout_s=20))
                    for flavour in FLAVOURS
                }

            working, idle, early = client_of_each(), client_of_each(), client_of_each()
            assert set(errors_of(idle).values()) == {None}
            callers = [
                caller
                for client in working.values()
                for caller in stack.enter_context(busy(client, SHARED_PATHS, CALLERS_OF_EACH_CLIENT))
            ]
            for caller in callers:
                caller.wait_for_answer()
            mortal.kill()
            for caller in callers:
                caller.wait_for_failure()
            self.errors_without_a_server = [*errors_of(early).values(), *errors_of(early).values()]
            mortal.come_back()
            for caller in callers:
                caller.wait_for_answer()
            failed = [caller.failed for caller in callers]
            for _ in range(FIVE_CALLS_LATER):
                for caller in callers:
                    caller.wait_for_answer()
            self.failed_again = [caller.failed for caller in callers] != failed
            self.wrong = [wrong for caller in callers for wrong in caller.wrong]
            self.errors_of_the_idle = errors_of(idle)
            eventually(lambda: set(errors_of(early).values()) == {None})
        with SomebodyElse.at(mortal.server) as somebody:
            self.left_registered = somebody.registered_by_this_process()


def errors_of(clients: dict[str, AnyClient]) -> dict[tuple[str, PathName], Exception | None]:
    return {(flavour, path): error_of(client, path) for flavour, client in clients.items() for path in SHARED_PATHS}


def error_of(client: AnyClient, path: PathName) -> Exception | None:
    """Return what a call raises; None if it gives what it should."""
    try:
        with client.infer("identity", {"INPUT0": X}, outputs=HINTS, path=path) as result:
            np.testing.assert_array_equal(result["OUTPUT0"], X)
            assert result.path == path
    except Exception as error:
        return error.with_traceback(None)
    return None


def is_stopped(pid: int) -> bool:
    stats = [read_if_there(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats if stat)


@contextlib.contextmanager
def stopped(mortal: MortalServer) -> Iterator[None]:
    """Keep the server from doing anything for as long as the block takes."""
    os.kill(mortal.server.pid, signal.SIGSTOP)
    try:
        eventually(lambda: is_stopped(mortal.server.pid))  # the signal reaches each thread in its own time
        yield
    finally:
        os.kill(mortal.server.pid, signal.SIGCONT)


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(mortal: MortalServer, flavour: str) -> Iterator[AnyClient]:
    """A client that leaves nothing registered."""
    with SomebodyElse.at(mortal.server) as somebody:
        before = somebody.registered_by_this_process()
        with client_of(flavour, url_of(mortal.server, flavour), timeout_s=20) as client:
            yield client
        # Triton from 24.12 on lists what was unregistered until its requests have ended.
        eventually(lambda: somebody.registered_by_this_process() <= before)


def test_a_server_that_dies_and_comes_back_is_called_again(mortal: MortalServer) -> None:
    story = Story(mortal)
    assert story.wrong == [], "every call gives the right bytes or one of our errors"
    assert not story.failed_again, "once a caller was answered, no call fails any more"
    assert story.errors_of_the_idle == dict.fromkeys(story.errors_of_the_idle), "who was idle does not notice"
    for error in story.errors_without_a_server:
        assert isinstance(error, ServerUnavailableError)
        assert re.search("is it running|still running", str(error))
    assert story.left_registered == set()


@pytest.mark.parametrize("path", SHARED_PATHS)
def test_a_server_too_slow_to_answer_is_asked_again(mortal: MortalServer, client: AnyClient, path: PathName) -> None:
    with pytest.raises(TensorError):  # the model is known now, but not yet which paths are open
        client.infer("identity", {"WRONG": X})
    with stopped(mortal), pytest.raises(DeadlineExceededError):
        client.infer("identity", {"INPUT0": X}, path=path, timeout_s=0.2)
    assert error_of(client, path) is None


def test_a_registration_without_an_answer_is_undone_with_the_client(mortal: MortalServer, client: AnyClient) -> None:
    client.infer("identity", {"INPUT0": X}, path="inline").release()  # all that is asked before is known
    with stopped(mortal), pytest.raises(DeadlineExceededError):
        client.infer("identity", {"INPUT0": X}, path="triton-shm", timeout_s=0.2)
    assert error_of(client, "triton-shm") is None


def test_an_unregistration_without_an_answer_is_made_again(mortal: MortalServer, client: AnyClient) -> None:
    client.infer("identity", {"INPUT0": X}, path="triton-shm").release()
    larger = np.tile(X, 50)  # its memory takes the place of the other, which is unregistered
    with stopped(mortal), pytest.raises(DeadlineExceededError):
        client.infer("identity", {"INPUT0": larger}, path="triton-shm", timeout_s=0.2)
    with client.infer("identity", {"INPUT0": larger}, path="triton-shm") as result:
        np.testing.assert_array_equal(result["OUTPUT0"], larger)
