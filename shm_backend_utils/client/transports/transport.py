"""Connections to a server, for threads and for tasks; making one from a URL; whether its host is this machine."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from ...memory.descriptors import NO_DESCRIPTORS, translate_os_errors
from ..extra import name_missing_library
from ..options import Tls
from .messages import Codec, split_url

__all__ = ["AsyncTransport", "Connectable", "Transport", "connect", "connect_async", "is_this_machine"]


class _Connection(ABC):
    codec: Codec  # makes the messages that the connection sends
    address: str  # with the scheme, for error messages
    host: str  # as in the URL


class Transport(_Connection):
    """A connection that several threads may use at once. It raises only this package's errors."""

    @abstractmethod
    def send(self, message: Any, timeout_s: float) -> Any:
        """Send a message and return the answer, as the codec reads it; InferenceError if the answer is an error.

        DeadlineExceededError or ServerUnavailableError if no answer comes; ClosedError if the connection was closed,
        before or meanwhile.
        """

    @abstractmethod
    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        """Send a request and return the answers as they come; ``timeout_s`` is the longest wait for the next."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection and end its pending requests. Twice is fine."""


class AsyncTransport(_Connection):
    """A connection for tasks of one event loop, which must be running when the connection is made."""

    @abstractmethod
    async def send(self, message: Any, timeout_s: float) -> Any:
        """As :meth:`Transport.send`."""

    @abstractmethod
    def stream(self, message: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        """As :meth:`Transport.stream`."""

    @abstractmethod
    async def close(self) -> None:
        """As :meth:`Transport.close`."""


@translate_os_errors("to look up a host takes a file descriptor")
def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: a socket can bind to it. NoDescriptorsError if no socket can be opened."""
    try:
        addresses: Sequence[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        return _is_none_of_ours(error)  # the first request reports an unknown name
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError as error:
        return _is_none_of_ours(error)
    return True


def _is_none_of_ours(error: OSError) -> bool:
    """Return False, or raise the error if it leaves the question open."""
    if error.errno in NO_DESCRIPTORS:
        raise error
    return False


@runtime_checkable
class Connectable(Protocol):
    """A server without an address, which clients take in place of a URL and ask for their connection."""

    def connect(self) -> Transport:
        """Return a transport for threads."""

    def connect_async(self) -> AsyncTransport:
        """Return a transport for tasks of the running event loop."""


def connect(url: str | Connectable, tls: Tls | None) -> Transport:
    """Return a transport for threads, which sends nothing yet; CallerError if the URL is not valid."""
    if isinstance(url, Connectable):
        return url.connect()
    kind, _, where = _transports_of(url, tls)
    return kind(*where)


def connect_async(url: str | Connectable, tls: Tls | None) -> AsyncTransport:
    """Return a transport for tasks of the running event loop; otherwise as :func:`connect`."""
    if isinstance(url, Connectable):
        return url.connect_async()
    _, kind, where = _transports_of(url, tls)
    return kind(*where)


def _transports_of(
    url: str, tls: Tls | None
) -> tuple[Callable[..., Transport], Callable[..., AsyncTransport], Sequence[Any]]:
    """Return both transports of a URL's protocol, and their arguments; ModuleNotFoundError if a library is missing."""
    protocol, is_secure, address, host = split_url(url)
    tls = (tls or Tls()) if is_secure else None
    with name_missing_library():
        if protocol == "http":
            from .http.transport import AsyncHttpTransport, HttpTransport  # noqa: PLC0415

            return HttpTransport, AsyncHttpTransport, (address, host, tls)
        from .grpc.transport import AsyncGrpcTransport, GrpcAddress, GrpcTransport, tls_credentials  # noqa: PLC0415
    credentials = None if tls is None else tls_credentials(tls)
    return GrpcTransport, AsyncGrpcTransport, (GrpcAddress(address, host, credentials),)
