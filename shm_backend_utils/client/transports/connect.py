"""From a URL to a transport, and whether its host is this machine. A protocol's modules are imported for it alone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ...memory.descriptors import NO_DESCRIPTORS, translate_os_errors
from ..extra import name_missing_library
from ..options import Tls
from .messages import split_url
from .transport import AsyncTransport, Transport

__all__ = ["Connectable", "connect", "connect_async", "is_this_machine"]


@translate_os_errors("to look up a host takes a file descriptor")
def is_this_machine(host: str) -> bool:
    """Return whether a socket can be bound to a host: only to this machine's; NoDescriptorsError if nothing tells."""
    try:
        addresses: Sequence[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        return _no(error)  # what the name means, the first request will tell
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError as error:
        return _no(error)
    return True


def _no(error: OSError) -> bool:
    """Return that it is not, unless nothing could be found out."""
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
    """Return a transport for threads, which sends nothing yet; CallerError if the URL is none."""
    if isinstance(url, Connectable):
        return url.connect()
    kind, _, where = _found(url, tls)
    return kind(*where)


def connect_async(url: str | Connectable, tls: Tls | None) -> AsyncTransport:
    """Return a transport for tasks of the running event loop; otherwise as :func:`connect`."""
    if isinstance(url, Connectable):
        return url.connect_async()
    _, kind, where = _found(url, tls)
    return kind(*where)


def _found(url: str, tls: Tls | None) -> tuple[Callable[..., Transport], Callable[..., AsyncTransport], Sequence[Any]]:
    """Return the two transports of a URL's protocol, and where they go; ModuleNotFoundError if a library is missing."""
    protocol, is_secure, address, host = split_url(url)
    tls = (tls or Tls()) if is_secure else None
    with name_missing_library():
        if protocol == "http":
            from .http.transport import AsyncHttpTransport, HttpTransport  # noqa: PLC0415

            return HttpTransport, AsyncHttpTransport, (address, host, tls)
        from .grpc.address import GrpcAddress, tls_credentials  # noqa: PLC0415
        from .grpc.transport import AsyncGrpcTransport, GrpcTransport  # noqa: PLC0415
    credentials = None if tls is None else tls_credentials(tls)
    return GrpcTransport, AsyncGrpcTransport, (GrpcAddress(address, host, credentials),)
