"""From a URL to a transport. Modules that only one protocol needs are imported only for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..extra import name_missing_library
from ..options import Tls
from .messages import split_url
from .transport import AsyncTransport, Transport

__all__ = ["Connectable", "connect", "connect_async"]


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
