"""Servers over gRPC: calls go over this package's own sockets if possible, else over a channel of grpcio."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import select
import threading
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import hpack
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ....errors import CallerError, ClosedError, ShmError
from ....memory.descriptors import translate_os_errors
from ....process import call_after_fork, never_destroy, owners_of_kind
from ....protocol.parameters import SLOT_PARAMETER
from ...errors import deadline_exceeded, proxy_for, translated, unavailable
from ...options import Tls
from ..aio_connections import AsyncConnections
from ..connections import Connections
from ..conversation import Server
from ..messages import Codec
from ..transport import AsyncTransport, Transport
from .aio_streams import AsyncStreams
from .codec import GrpcCodec, GrpcMessage, Metadata, error_of
from .http2 import Http2, Request
from .streams import DRAIN_S, ChannelReading, Reading, SocketReading, StreamingHttp2, Streams

__all__ = ["CHANNEL_OPTIONS", "AsyncGrpcTransport", "GrpcAddress", "GrpcTransport", "head_of", "tls_credentials"]

CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Messages of any size, as in tritonclient. A restarted server is found again within a second: by default gRPC waits
longer after each attempt, up to two minutes."""


_DESCRIPTORS: Final = 10
_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):[0-9]+")  # HOST:PORT


@dataclass(frozen=True)
class GrpcAddress:
    target: str  # as gRPC takes it: ``HOST:PORT``, or with a scheme of gRPC's in front
    host: str  # the machine in ``target``
    credentials: Any = None  # ``grpc.ChannelCredentials``; None without TLS
    options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS  # the channel's arguments, in gRPC's words

    @translate_os_errors(f"a connection over gRPC takes {_DESCRIPTORS} file descriptors", "gRPC cannot work here: {}")
    def channel(self, module: Any) -> Any:
        """Open a channel of ``grpc`` or ``grpc.aio``, if there are file descriptors: else gRPC ends the process."""
        for each in [select.epoll() for _ in range(_DESCRIPTORS)]:
            each.close()
        if self.credentials is None:
            return module.insecure_channel(self.target, options=self.options)
        return module.secure_channel(self.target, self.credentials, options=self.options)

    def needs_grpcio(self) -> str:
        """Return why grpcio carries all calls; empty if this client's own sockets carry most."""
        if self.credentials is not None:
            return "TLS"
        if self.options is not CHANNEL_OPTIONS:
            return "options of the channel"
        if _PLACE.fullmatch(self.target) is None:
            return "an address in gRPC's own words"
        proxy = proxy_for(str(self))
        return f"the proxy in the environment variable {proxy}" if proxy else ""

    def server(self, conversation: type[Http2]) -> Server:
        place = urllib.parse.urlsplit(f"//{self.target}")
        return Server(place.hostname or "", place.port or 0, str(self), conversation)

    def __str__(self) -> str:
        return f"{'grpc' if self.credentials is None else 'grpcs'}://{self.target}"


def tls_credentials(tls: Tls) -> Any:
    """Return certificates as gRPC takes them; raises OSError if one cannot be read."""
    return grpc.ssl_channel_credentials(
        _content(tls.root_certificates), _content(tls.private_key), _content(tls.certificate_chain)
    )


def _content(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


_ALWAYS_ENDED: Final = "triton_enable_empty_final_response"  # Triton then marks a stream's end, even without an answer
_IS_LAST: Final = "triton_final_response"
_ENDED: Final = "the stream has ended before its last response"
_MOST_BYTES: Final = 1 << 18
"""grpcio carries larger requests, for which it is faster."""


class _Grpc:
    def __init__(self, address: GrpcAddress, complete: Callable[[Metadata], Metadata] | None = None) -> None:
        self.codec: Codec = GrpcCodec(complete)
        self.host = address.host
        self.address = self.codec.address = str(address)
        self.codec.needs_grpcio = address.needs_grpcio()
        self._grpc_address = address
        self._way_of = functools.cache(functools.partial(_way_of, address.target))
        self._is_closed = False


class GrpcTransport(_Grpc, Transport):
    def __init__(self, address: GrpcAddress, complete: Callable[[Metadata], Metadata] | None = None) -> None:
        super().__init__(address, complete)
        self._connections = self._stream_connections = None
        if not self.codec.needs_grpcio:
            self._connections = Connections(address.server(Http2))
            self._stream_connections = Connections(address.server(StreamingHttp2))
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._streams = Streams()

    def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        procedure, request, metadata, compression = message
        try:
            if self._connections is not None and not (metadata or compression):
                content = request.SerializeToString()
                if len(content) <= _MOST_BYTES:
                    head, read = self._way_of(procedure)
                    reply = self._connections.call(Request(head, content), timeout_s)
                    if reply.status:
                        raise error_of(reply, self.address)
                    return read(reply.message)
            call = getattr(self._service(), procedure)
            return call(request, timeout=timeout_s, metadata=metadata, compression=compression)
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None

    def stream(self, message: GrpcMessage, timeout_s: float) -> Generator[Any, None, None]:
        message.request.parameters[_ALWAYS_ENDED].bool_param = True
        owner, is_over = os.getpid(), False
        reading: Reading | None = None
        try:
            reading = self._reading(message)
            self._streams.add(reading)
            if self._is_closed:  # an earlier close() did not see this stream
                raise ClosedError("this client")
            while True:  # as in Connections.call
                if (answer := reading.next_answer(DRAIN_S if is_over else timeout_s)) is None:
                    break
                if is_over:
                    return  # messages behind the last response are nobody's
                response = _response(answer, self.address)
                is_over = _IS_LAST in response.parameters and response.parameters[_IS_LAST].bool_param
                if response.outputs or not is_over:
                    yield response
            self._streams.used.discard(reading)
            reading = None  # it has ended
            if not is_over:
                raise ClosedError("this client") if self._is_closed else unavailable(self.address, _ENDED)
        except Exception as error:
            if not is_over:  # else the user has every response
                raise _error(error, self.address, self._is_closed) from None
        finally:
            if reading is not None and os.getpid() == owner:  # a child must not speak on its parent's connection
                self._streams.leave(reading)

    def _reading(self, message: GrpcMessage) -> Reading:
        _, request, metadata, compression = message
        content = request.SerializeToString()
        is_in_ring = SLOT_PARAMETER in request.parameters  # else whole tensors come, and grpcio is faster
        if self._stream_connections is None or metadata or compression or len(content) > _MOST_BYTES or not is_in_ring:
            call = self._service().ModelStreamInfer(iter((request,)), metadata=metadata, compression=compression)
            return ChannelReading(call)
        head, read = self._way_of("ModelStreamInfer")
        return SocketReading(self._stream_connections, head, content, read)

    def close(self) -> None:
        self._is_closed = True
        try:
            if self._connections is not None:
                self._connections.close()
            self._streams.close()
        finally:
            if self._stream_connections is not None:
                self._stream_connections.close()
            with self._lock:
                if self._channel is not None:
                    self._channel.close()

    def _service(self) -> Any:
        """Return gRPC's stub, over a channel that is opened when it is first needed."""
        with self._lock:
            if self._channel is None:
                if self._is_closed:
                    raise ClosedError("this client")
                self._channel = self._grpc_address.channel(grpc)
                self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
            return self._stub


class AsyncGrpcTransport(_Grpc, AsyncTransport):
    def __init__(self, address: GrpcAddress) -> None:
        super().__init__(address)
        self._process = os.getpid()
        self._connections = None if self.codec.needs_grpcio else AsyncConnections(address.server(Http2))
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._streams = AsyncStreams()

    async def send(self, message: GrpcMessage, timeout_s: float) -> Any:
        procedure, request, metadata, compression = message
        try:
            if self._connections is not None and not (metadata or compression):
                content = request.SerializeToString()
                if len(content) <= _MOST_BYTES:
                    head, read = self._way_of(procedure)
                    reply = await self._connections.call(Request(head, content), timeout_s)
                    if reply.status:
                        raise error_of(reply, self.address)
                    return read(reply.message)
            call = getattr(self._service(), procedure)
            return await call(request, timeout=timeout_s, metadata=metadata, compression=compression)
        except asyncio.CancelledError:
            is_cancelled = getattr(asyncio.current_task(), "cancelling", bool)()  # Python 3.10 lacks it
            if self._is_closed and not is_cancelled:
                raise ClosedError("this client") from None
            raise
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None

    async def stream(self, message: GrpcMessage, timeout_s: float) -> AsyncGenerator[Any, None]:
        _, request, metadata, compression = message
        owner = os.getpid()
        try:
            call = self._service().ModelStreamInfer(iter((request,)), metadata=metadata, compression=compression)
        except Exception as error:
            raise _error(error, self.address, self._is_closed) from None
        reading = self._streams.begin(call)
        try:
            while True:
                getting = asyncio.ensure_future(reading.answers.get())
                try:  # not wait_for, which may swallow a cancellation before Python 3.12
                    if not (await asyncio.wait((getting,), timeout=timeout_s))[0]:
                        raise deadline_exceeded()
                finally:
                    getting.cancel()  # does nothing if there is an answer
                answer = getting.result()
                if answer is grpc.aio.EOF:
                    return
                if isinstance(answer, BaseException):
                    raise _error(answer, self.address, self._is_closed) from None
                reading.wanted.release()
                yield _response(answer, self.address)
        finally:
            if os.getpid() == owner:  # a forked child must not speak on its parent's connection
                reading.leave()

    def after_fork(self) -> None:
        """In a forked child, never destroy this transport: gRPC's own state stays there, too."""
        never_destroy(self)

    async def close(self) -> None:
        self._is_closed = True
        try:
            if self._connections is not None:
                await self._connections.close()
            await self._streams.close()
        finally:
            if self._channel is not None:
                await self._channel.close()

    def _service(self) -> Any:
        """Return gRPC's stub; CallerError if a parent had a channel open at the fork: gRPC's thread is missing here."""
        if self._channel is None:
            if self._is_closed:
                raise ClosedError("this client")
            open_here = [each for each in owners_of_kind(AsyncGrpcTransport) if not each._is_closed]
            if any(each._process != self._process for each in open_here):
                raise CallerError(
                    "this process was forked while an AsyncShmClient had a channel of grpcio open, so calls by asyncio "
                    "over such a channel would never be answered here; close the client before the fork, spawn "
                    "processes instead, or use HTTP or ShmClient"
                )
            self._channel = self._grpc_address.channel(grpc.aio)
            call_after_fork(self)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub


def _response(answer: Any, address: str) -> Any:
    if answer.error_message:
        raise translated(None, answer.error_message, address)
    return answer.infer_response


def _error(error: Any, address: str, is_closed: bool) -> BaseException:
    """Return errors of gRPC and protobuf as ours, and others as they are; a ClosedError if the client was closed."""
    if isinstance(error, DecodeError):
        return translated("StatusCode.INTERNAL", f"the answer cannot be read: {error}", address)
    if not isinstance(error, grpc.RpcError):
        return ClosedError("this client") if is_closed and not isinstance(error, ShmError) else error
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return ClosedError("this client")
    return translated(str(error.code()), error.details() or "", address)


def _way_of(authority: str, procedure: str) -> tuple[bytes, Callable[[bytes], Any]]:
    """Return the headers of a procedure's calls, and the function that reads its answers."""
    return head_of(procedure, authority), getattr(service_pb2, f"{procedure}Response").FromString


def head_of(procedure: str, authority: str) -> bytes:
    """Return a call's headers in HPACK, up to the timeout's value. They use no dynamic table."""
    headers = (
        (":path", f"/inference.GRPCInferenceService/{procedure}"),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    encoder = hpack.Encoder()
    plain = [hpack.NeverIndexedHeaderTuple(name, value) for name, value in headers]
    return b"\x83\x86%b\x00\x0cgrpc-timeout" % encoder.encode(plain, huffman=False)
