"""A stub in a process of its own, as its server sees it: requests go there, and answers come back."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ...process import call_after_fork, never_destroy
from ..emulator import Delivery
from ..emulator.host import Faults
from .stub import Receiver, ServerCalls, StubError

__all__ = ["ChildInstance"]

_PACKAGES: Final = Path(__file__).resolve().parents[3]
_EXIT_S: Final = 10.0


class ChildInstance:
    """One instance of a model's code, a :class:`.Stub`, in a child process; one that has died stays dead."""

    def __init__(self, file: Path, name: str, calls: ServerCalls, server_url: str, faults: Faults) -> None:
        self._name = name
        self._calls = calls
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()
        self._is_dead = False
        ours, theirs = socket.socketpair()
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shm_backend_utils.testing.harness.child_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        call_after_fork(self)
        self._reader = threading.Thread(target=self._read, name=f"{name} child", daemon=True)
        self._reader.start()
        try:
            self._ask("make", file, name, server_url, faults)
        except BaseException:
            self._end()
            raise

    def after_fork(self) -> None:
        """In a forked child, close the copy of the connection, so that the stub ends with the parent."""
        self._is_dead = True
        self._connection.close()
        never_destroy(self._process)  # its destructor would warn that it still runs

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    def load(self) -> None:
        self._ask("load")

    def auto_complete(self, config: str) -> str | None:
        completed: str | None = self._ask("auto_complete", config)
        return completed

    def initialize(self, args: Mapping[str, str], is_decoupled: bool) -> None:
        self._name = args["model_instance_name"]
        self._ask("initialize", dict(args), is_decoupled)

    def execute(self, deliveries: Sequence[Delivery], receivers: Sequence[Receiver]) -> None:
        numbers = [next(self._numbers) for _ in receivers]
        with self._lock:
            self._receivers.update(zip(numbers, receivers, strict=True))
        for number, receiver in zip(numbers, receivers, strict=True):
            watch = getattr(receiver, "when_cancelled", None)
            if watch is not None:
                watch(lambda number=number: self._send("cancel", number))
        try:
            self._ask("execute", list(zip(numbers, deliveries, strict=True)))
        except StubError as error:
            for receiver in receivers:
                receiver.fail(str(error))

    def is_ready(self) -> bool:
        try:
            is_ready: bool = self._ask("is_ready")
        except StubError:
            return False
        return is_ready

    def finalize(self) -> None:
        try:
            if not self._is_dead:
                self._ask("finalize")
        except StubError:
            if not self._is_dead:
                raise
        finally:
            self._end()

    def _end(self) -> None:
        self._send("end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._connection.close()

    def _ask(self, what: str, *content: Any) -> Any:
        """Send a message, and return the answer."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._waiting[number] = answers
            is_dead = self._is_dead
        if is_dead or not self._send(what, number, *content):
            self._is_dead = True
            answers.put((False, self._unhealthy))
        is_fine, value = answers.get()
        with self._lock:
            self._waiting.pop(number, None)
        if not is_fine:
            raise StubError(value)
        return value

    @property
    def _unhealthy(self) -> str:
        return f"Stub process '{self._name}' is not healthy."

    def _send(self, *message: Any) -> bool:
        try:
            with self._lock:
                self._connection.send(message)
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                what, number, *content = self._connection.recv()
                self._take(what, number, content)
        with self._lock:
            self._is_dead = True
            waiting, receivers = list(self._waiting.values()), list(self._receivers.values())
            self._receivers.clear()
        for answers in waiting:
            answers.put((False, self._unhealthy))
        for receiver in receivers:
            receiver.fail(self._unhealthy)

    def _take(self, what: str, number: int, content: list[Any]) -> None:
        if what == "answer":
            with self._lock:
                answers = self._waiting.get(number)
            if answers is not None:
                answers.put((content[0], content[1]))
        elif what == "call":
            threading.Thread(target=self._serve, args=(number, *content), name="shm harness call", daemon=True).start()
        elif what == "log":
            self._calls.log(*content)
        else:
            self._hand_on(what, number, content)

    def _hand_on(self, what: str, number: int, content: list[Any]) -> None:
        with self._lock:
            receiver = self._receivers.get(number)
            if receiver is not None and (what != "put" or content[0].is_final):
                del self._receivers[number]
        if receiver is not None:
            getattr(receiver, what)(*content)

    def _serve(self, number: int, what: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Execute the child's call, and send it each part of the answer."""
        try:
            answer = getattr(self._calls, what)(*arguments, **named)
            if what == "call_model":
                for outcome in answer:
                    self._send("part", number, True, outcome)
            else:
                self._send("part", number, True, answer)
        except Exception as error:  # whatever it is: the child waits for it
            self._send("part", number, False, str(error))
