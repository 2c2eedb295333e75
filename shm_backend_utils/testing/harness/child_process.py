"""The process of a stub: ``python -m shm_backend_utils.testing.harness.child_process FD``."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ..emulator import MetricsRegistry, TritonModelException
from .requests import Outcome
from .stub import ModelCall, Stub, StubError

__all__: list[str] = []


class _Parent:
    """The server, over the connection to it: a :class:`.ServerCalls`."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._parts: dict[int, queue.SimpleQueue[tuple[bool, Any]]] = {}
        self.metrics = MetricsRegistry()
        self.log = partial(self.send, "log", 0)
        self.load_model = partial(self._call, "load_model")
        self.unload_model = partial(self._call, "unload_model")
        self.is_model_ready = partial(self._call, "is_model_ready")

    def send(self, *message: Any) -> None:
        """Send a message; the other end may be gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def tell(self, number: int, is_fine: bool, value: Any) -> None:  # out of a message
        """Take a part of the answer to a call."""
        self._parts[number].put((is_fine, value))

    def call_model(self, call: ModelCall) -> Iterator[Outcome]:
        """Have another model execute a request."""
        part = self._ask("call_model", call)
        while True:
            outcome: Outcome = part()
            yield outcome
            if outcome.is_final:
                return

    def _call(self, what: str, *arguments: Any, **named: Any) -> Any:
        return self._ask(what, *arguments, **named)()

    def _ask(self, what: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
        number = next(self._numbers)
        parts = self._parts[number] = queue.SimpleQueue()

        def part() -> Any:
            is_fine, value = parts.get()
            if not is_fine:
                raise TritonModelException(value)
            return value

        self.send("call", number, what, arguments, named)
        return part


class _Receiver:
    """Hands a model's answers on to the server."""

    def __init__(self, parent: _Parent, number: int, cancelled: set[int]) -> None:
        self._parent = parent
        self._number = number
        self._cancelled = cancelled

    def put(self, outcome: Outcome) -> None:
        self._parent.send("put", self._number, outcome)

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        self._parent.send("fail", self._number, message, code)

    def let_go(self) -> None:
        self._parent.send("let_go", self._number)

    def is_cancelled(self) -> bool:
        return self._number in self._cancelled


class _Process:
    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._parent = _Parent(connection)
        self._work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._stub: Stub  # set by the first message

    def run(self) -> None:
        """Execute one message after another in the main thread, until the end."""
        threading.Thread(target=self._read, name="server", daemon=True).start()
        while (message := self._work.get()) is not None:
            what, number, *content = message
            try:
                value = None
                if what == "make":
                    file, name, url, faults = content
                    self._stub = Stub(file, name, self._parent, url, faults)
                elif what == "execute":
                    receivers = [_Receiver(self._parent, each, self._cancelled) for each, _ in content[0]]
                    self._stub.execute([delivery for _, delivery in content[0]], receivers)
                else:
                    value = getattr(self._stub, what)(*content)
            except StubError as error:
                self._parent.send("answer", number, False, str(error))
            else:
                self._parent.send("answer", number, True, value)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                what, *content = self._connection.recv()
                if what == "part":
                    self._parent.tell(*content)
                elif what == "cancel":
                    self._cancelled.update(content)
                elif what == "is_ready":  # also while the main thread executes
                    threading.Thread(target=self._tell_readiness, args=content, name="readiness", daemon=True).start()
                elif what == "end":
                    self._work.put(None)
                    return
                else:
                    self._work.put((what, *content))
        os._exit(1)  # the server is gone, and the main thread may wait for its answer

    def _tell_readiness(self, number: int) -> None:
        self._parent.send("answer", number, True, self._stub.is_ready())


if __name__ == "__main__":
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    _Process(connection).run()
    sys.stdout.flush()
    os._exit(0)  # threads of the model's may still run
