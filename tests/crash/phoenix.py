"""A server that is killed and comes back on the same ports, and callers that are busy all the while."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ShmError
from shm_backend_utils.server import EmbeddedServer

from .either_client import EitherClient
from .ports import free_ports

__all__ = ["Caller", "Phoenix", "busy"]

PATIENCE_S = 30.0
LENGTH = 2000


class Phoenix:
    """A server that can be killed and started again."""

    def __init__(self, models: Path, log_file: Path) -> None:
        self._models = models
        self._log_file = log_file
        self._ports = free_ports()
        self.server = self._start()

    def kill(self) -> None:
        """Kill the server."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def come_back(self) -> None:
        """Start it again, and return when it is ready."""
        self.server = self._start()

    def _start(self) -> EmbeddedServer:
        return EmbeddedServer.start(self._models, ports=self._ports, log_file=self._log_file)


class Caller:
    """A thread that calls `identity` again and again, each time with other values, and keeps what came of it."""

    def __init__(self, client: EitherClient, path: PathName, number: int) -> None:
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
        """Return when a call has failed."""
        self._wait(lambda: self.failed > 0)

    def end(self) -> None:
        """Return when the last call is over."""
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
def busy(client: EitherClient, paths: Sequence[PathName], count: int) -> Iterator[list[Caller]]:
    """Keep so many callers busy, on these paths in turn, until the block ends."""
    callers = [Caller(client, paths[number % len(paths)], number) for number in range(count)]
    try:
        yield callers
    finally:
        for caller in callers:
            caller.end()
