"""Callers that are busy while a server is killed and comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ShmError

from ..e2e.flavours import AnyClient

__all__ = ["Caller", "busy"]

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
