"""Connections to the emulated server: messages are answered in this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Generator
from typing import Any, Final, NamedTuple

from ...client.errors import deadline_exceeded, translated
from ...client.transports.grpc.codec import GrpcCodec, GrpcMessage
from ...client.transports.transport import AsyncTransport, Transport
from ...errors import ClosedError, translate
from .procedures import PROCEDURES, infer, stream_infer
from .requests import CANCELLED, Answer, ServerError
from .server import EmulatedServer

__all__ = ["AsyncHarnessTransport", "HarnessTransport"]

_STATUSES: Final = {
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNSUPPORTED": "UNIMPLEMENTED",
}
"""gRPC's names of Triton's codes, where they differ."""
_ADDRESS: Final = "the model harness"
_HOST: Final = "127.0.0.1"
_THREADS: Final = 64
_INFER: Final = "ModelInfer"


class _Answering:
    """Answers messages; those for models in threads, so that a sender can stop waiting."""

    def __init__(self, server: EmulatedServer) -> None:
        self._server = server
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "shm harness")
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, message: GrpcMessage) -> _Call:
        """Send a message, and return the call that gets its answer."""
        self.check_open()
        began: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        if message.procedure == _INFER:
            return _Call(self._threads.submit(self._infer, message, began), began)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._translating():
            done.set_result(PROCEDURES[message.procedure](self._server, message.request))
        return _Call(done, began)

    def stream(self, message: GrpcMessage, timeout_s: float) -> Generator[Any, None, None]:
        """Yield the responses to a request, as they come."""
        self.check_open()
        try:
            for answer in stream_infer(self._server, message.request, timeout_s):
                self.check_open()
                if answer.error_message:
                    raise translated(None, answer.error_message, _ADDRESS)
                yield answer.infer_response
        except TimeoutError:
            raise deadline_exceeded() from None

    def check_open(self) -> None:
        """Raise ClosedError if this is closed."""
        if self._is_closed:
            raise ClosedError("this client")

    def close(self) -> None:
        """Cancel unanswered requests, wait for those in execution, and end. It can be called again."""
        with self._lock:
            self._is_closed = True
            answers = list(self._answers)
        for answer in answers:
            answer.cancel()
        self._threads.shutdown()

    def _infer(self, message: GrpcMessage, began: concurrent.futures.Future[Answer]) -> Any:
        def begin(answer: Answer) -> None:
            with self._lock:
                self.check_open()
                self._answers.add(answer)
            began.set_result(answer)

        with self._translating():
            return infer(self._server, message.request, begin)

    def _translating(self) -> translate[ServerError]:
        """Raise the server's refusals as the errors that clients know."""

        def meaning(error: ServerError) -> BaseException:
            if error.code == CANCELLED:
                self.check_open()
            status = _STATUSES.get(error.code, error.code)
            return translated(f"StatusCode.{status}", error.message, _ADDRESS)

        return translate(ServerError, meaning)


class _Call(NamedTuple):
    """A message under way."""

    done: concurrent.futures.Future[Any]  # of the answering message
    began: concurrent.futures.Future[Answer]  # of the model's answer, which can be cancelled

    def give_up(self) -> None:
        """Stop waiting, and cancel the request, unless it is answered."""
        if not self.done.done():
            self.done.cancel()
            self.began.add_done_callback(lambda began: began.result().cancel())


class HarnessTransport(Transport):
    """For threads."""

    def __init__(self, server: EmulatedServer) -> None:
        self.codec = GrpcCodec()
        self.address = _ADDRESS
        self.host = _HOST
        self._answering = _Answering(server)

    def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        call = self._answering.send(message)
        try:
            return call.done.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise deadline_exceeded() from None
        finally:
            call.give_up()
            del call  # an error and its frames would keep each other, and with them the memory of a result

    def stream(self, message: GrpcMessage, timeout_s: float) -> Generator[Any, None, None]:
        return self._answering.stream(message, timeout_s)

    def close(self) -> None:
        self._answering.close()


class AsyncHarnessTransport(AsyncTransport):
    """For tasks of one event loop."""

    def __init__(self, server: EmulatedServer) -> None:
        self.codec = GrpcCodec()
        self.address = _ADDRESS
        self.host = _HOST
        self._answering = _Answering(server)

    async def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        call = self._answering.send(message)
        done = asyncio.wrap_future(call.done)
        try:
            await asyncio.wait({done}, timeout=timeout_s)
            if not done.done():
                raise deadline_exceeded()
            return done.result()
        finally:
            done.cancel()
            call.give_up()
            del call, done  # an error and its frames would keep each other, and with them the memory of a result

    async def stream(self, message: GrpcMessage, timeout_s: float) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        responses = _InOneThread(self._answering.stream(message, timeout_s))
        try:
            while True:
                is_over, response = await loop.run_in_executor(None, responses.step)
                if is_over:
                    return
                yield response
        finally:
            await loop.run_in_executor(None, responses.close)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._answering.close)


class _InOneThread:
    """A generator whose steps come from different threads, one after another."""

    def __init__(self, responses: Generator[Any, None, None]) -> None:
        self._responses = responses
        self._lock = threading.Lock()

    def step(self) -> tuple[bool, Any]:
        """Return whether it is over, and the next response if not."""
        with self._lock:
            try:
                return False, next(self._responses)
            except StopIteration:
                return True, None

    def close(self) -> None:
        """End it."""
        with self._lock, contextlib.suppress(ValueError):
            self._responses.close()
