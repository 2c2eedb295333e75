"""Connections over gRPC. They call the service that tritonclient brings, without its client in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from ....errors import CallerError, ClosedError
from ....forks import forsake_in_children, never_destroy, owners_of_kind
from ...errors import deadline_exceeded, translated
from ..transport import AsyncTransport, Transport, is_cancelled
from .address import GrpcAddress
from .codec import GrpcCodec, GrpcMessage, Metadata

__all__ = ["AsyncGrpcTransport", "GrpcTransport"]

_AHEAD: Final = 2
"""So many responses of a stream are read before the user wants them. Then HTTP/2's flow control has the server wait."""
_DRAIN_S: Final = 1.0
"""How long a stream that its user has left is read on before it is cancelled.

Triton 2.51 and 2.73 crash when a stream is cancelled while a response is written, once in some 20 to 200 times. Most
streams end within that time, and those that do not have long pauses between responses.
"""


class GrpcTransport(Transport):
    """For threads. May be used from several at once."""

    def __init__(self, address: GrpcAddress, complete: Callable[[Metadata], Metadata] | None = None) -> None:
        self.codec = GrpcCodec(complete)
        self.host = address.host
        self.address = self.codec.address = str(address)
        self._channel = address.channel(grpc)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_closed = False
        self._draining: list[threading.Thread] = []

    def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        procedure, request, metadata, compression = message
        try:
            return getattr(self._service, procedure)(
                request, timeout=timeout_s, metadata=metadata, compression=compression
            )
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None

    def stream(self, message: GrpcMessage, patience_s: float) -> Generator[Any, None, None]:
        _, request, metadata, compression = message
        owner = os.getpid()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike a semaphore, safe from interrupts
        reader: threading.Thread | None = None
        call: Any = None
        try:  # from here on, since a thread that an interrupt leaves behind would wait for ever, and so would the model
            try:
                # No more requests will come, so the server ends the stream after the last response.
                call = self._service.ModelStreamInfer(iter((request,)), metadata=metadata, compression=compression)
            except Exception as error:
                raise _error(error, self.address, self._is_closed) from None
            # gRPC's own iterator has no timeout.
            reader = threading.Thread(target=_read_into, args=(answers, call, wanted), name="shm stream", daemon=True)
            reader.start()
            while True:
                try:
                    answer = answers.get(timeout=patience_s)
                except queue.Empty:
                    raise deadline_exceeded() from None
                if answer is None:
                    return
                if isinstance(answer, BaseException):
                    raise _error(answer, self.address, self._is_closed) from None
                wanted.put(True)
                yield _response(answer, self.address)
        finally:
            wanted.put(False)
            if call is not None and os.getpid() == owner:  # a forked child must not speak on its parent's connection
                self._drain(call, reader)

    def _drain(self, call: Any, reader: threading.Thread | None) -> None:
        """Let a reader read a stream on for a while, unless it is over; then cancel it."""
        if reader is None or call.done():
            call.cancel()
            return
        thread = threading.Thread(target=_cancel_later, args=(call, reader), name="shm stream's end", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is none left, or the interpreter exits
            call.cancel()
            return
        self._draining = [*filter(threading.Thread.is_alive, self._draining), thread]

    def close(self) -> None:
        self._is_closed = True
        for thread in self._draining:
            thread.join()
        self._channel.close()


class AsyncGrpcTransport(AsyncTransport):
    """For tasks of one event loop, which must be running when it is made.

    CallerError if a parent of this process had one at the fork: all of a process share a thread, which children lack.
    """

    _is_closed = False

    def __init__(self, address: GrpcAddress) -> None:
        self._process = os.getpid()
        open_here = [each for each in owners_of_kind(AsyncGrpcTransport) if not each._is_closed]
        if any(each._process != self._process for each in open_here):
            raise CallerError(
                "this process was forked while an AsyncShmClient over gRPC was open, and calls by asyncio over gRPC "
                "would never be answered here: close it before the fork, or spawn processes; HTTP works, and so does "
                "ShmClient"
            )
        self.codec = GrpcCodec()
        self.host = address.host
        self.address = self.codec.address = str(address)
        self._channel = address.channel(grpc.aio)
        forsake_in_children(self)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._draining: set[asyncio.Task[None]] = set()

    async def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        procedure, request, metadata, compression = message
        try:
            return await getattr(self._service, procedure)(
                request, timeout=timeout_s, metadata=metadata, compression=compression
            )
        except asyncio.CancelledError:
            if self._is_closed and not is_cancelled():
                raise ClosedError("this client") from None
            raise
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None

    async def stream(self, message: GrpcMessage, patience_s: float) -> AsyncGenerator[Any, None]:
        _, request, metadata, compression = message
        owner = os.getpid()
        try:
            call = self._service.ModelStreamInfer(iter((request,)), metadata=metadata, compression=compression)
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None
        reading: asyncio.Future[Any] | None = None
        answer: Any = None
        try:
            while True:
                reading = asyncio.ensure_future(call.read())  # to cancel it would cancel the call
                if not (await asyncio.wait((reading,), timeout=patience_s))[0]:
                    raise deadline_exceeded()
                answer = reading.result()
                if answer is grpc.aio.EOF:
                    return
                yield _response(answer, self.address)
        except asyncio.CancelledError:
            if self._is_closed and not is_cancelled():
                raise ClosedError("this client") from None
            raise
        except grpc.RpcError as error:
            raise _error(error, self.address, self._is_closed) from None
        finally:
            # A forked child must not speak on its parent's connection.
            if answer is not grpc.aio.EOF and os.getpid() == owner:
                task = asyncio.ensure_future(_drained(call, reading))
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)

    def forsake(self) -> None:
        """Stay in a forked child, as what gRPC has of it does."""
        never_destroy(self)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*self._draining, return_exceptions=True)
        await self._channel.close()


def _read_into(answers: queue.SimpleQueue[Any], call: Any, wanted: queue.SimpleQueue[bool]) -> None:
    for _ in range(_AHEAD):
        wanted.put(True)
    is_wanted = True
    try:
        for answer in call:
            if is_wanted:
                answers.put(answer)
                is_wanted = wanted.get()
        answers.put(None)
    except Exception as error:  # whoever waits for the answers would wait in vain
        answers.put(error)


def _cancel_later(call: Any, reader: threading.Thread) -> None:
    reader.join(_DRAIN_S)
    call.cancel()


async def _drained(call: Any, reading: asyncio.Future[Any] | None) -> None:
    """Read a stream on for a while; then cancel it."""

    async def read_on() -> None:
        answer = None if reading is None else await reading
        while answer is not grpc.aio.EOF:
            answer = await call.read()

    with contextlib.suppress(asyncio.TimeoutError, grpc.RpcError):
        await asyncio.wait_for(read_on(), _DRAIN_S)
    call.cancel()


def _response(answer: Any, address: str) -> Any:
    """Return what one message of a stream carries; raise its error, if it has one."""
    if answer.error_message:
        raise translated(None, answer.error_message, address)
    return answer.infer_response


def _error(error: Any, address: str, is_closed: bool) -> Exception:
    """Return what gRPC raises as one of our errors, and what is no news of a call as it is.

    Whoever closes a channel cancels its calls. A call that begins meanwhile fails in one of several other ways.
    """
    if not isinstance(error, grpc.RpcError):
        return ClosedError("this client") if is_closed else error
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return ClosedError("this client")
    return translated(str(error.code()), error.details() or "", address)
