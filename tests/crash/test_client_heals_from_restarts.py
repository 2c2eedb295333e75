"""The server is killed and comes back, with its registrations lost, under a client that goes on calling."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
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
LENGTH = 2000


class Caller(threading.Thread):
    """Calls `identity` again and again, each time with other values, and keeps what came of it."""

    def __init__(self, client: AnyClient, path: PathName, number: int) -> None:
        super().__init__()
        self.answered = self.failed = 0
        self.wrong: list[str] = []
        self.is_over = False
        self._client, self._path, self._number = client, path, number

    def wait_for_answer(self) -> None:
        """Return when a call that begins after now was answered."""
        seen = self.answered
        eventually(lambda: self.answered > seen + 1)

    def run(self) -> None:
        value, hints = self._number, {"OUTPUT0": 4 * LENGTH}
        while not self.is_over:
            value += 1000
            x = np.full(LENGTH, value, np.float32)
            try:
                with self._client.infer("identity", {"INPUT0": x}, outputs=hints, path=self._path) as result:
                    if not np.array_equal(result["OUTPUT0"], x):
                        self.wrong.append("a result is not what was asked for")
                self.answered += 1
            except ShmError:
                self.failed += 1
                time.sleep(0.05)  # nobody answers for seconds: leave the cores to the server that is to come
            except BaseException as error:  # the test reads it
                self.wrong.append(repr(error))
                self.failed += 1


@contextlib.contextmanager
def busy(clients: Iterable[AnyClient]) -> Iterator[list[Caller]]:
    """Keep callers of each client busy, on these paths in turn, until the block ends."""
    callers = [Caller(client, SHARED_PATHS[number % 2], number) for client in clients for number in range(4)]
    try:
        for caller in callers:
            caller.start()
        yield callers
    finally:
        for caller in callers:
            caller.is_over = True
        for caller in callers:
            caller.join()


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
    """Of three clients of each flavour, one is busy all the while, one calls while there is no server, one does not."""
    with contextlib.ExitStack() as stack:
        working, idle, early = (
            {
                flavour: stack.enter_context(client_of(flavour, url_of(mortal.server, flavour), timeout_s=20))
                for flavour in FLAVOURS
            }
            for _ in range(3)
        )
        assert set(errors_of(idle).values()) == {None}
        callers = stack.enter_context(busy(working.values()))
        for caller in callers:
            caller.wait_for_answer()
        mortal.kill()
        eventually(lambda: all(caller.failed for caller in callers))
        for error in (*errors_of(early).values(), *errors_of(early).values()):
            assert isinstance(error, ServerUnavailableError)
            assert re.search("is it running|still running", str(error))
        mortal.come_back()
        for caller in callers:
            caller.wait_for_answer()
        failed = [caller.failed for caller in callers]
        for caller in callers * 5:
            caller.wait_for_answer()
        assert [caller.failed for caller in callers] == failed, "once a caller was answered, no call fails any more"
        wrong = [wrong for caller in callers for wrong in caller.wrong]
        assert wrong == [], "every call gives the right bytes or one of our errors"
        assert set(errors_of(idle).values()) == {None}, "who was idle does not notice"
        eventually(lambda: set(errors_of(early).values()) == {None})
    with SomebodyElse.at(mortal.server) as somebody:
        assert somebody.registered_by_this_process() == set()


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
