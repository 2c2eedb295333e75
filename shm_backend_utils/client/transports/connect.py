"""From a URL to a transport. What only one protocol needs is imported only for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..extra import what_is_missing_told
from ..options import Tls
from .messages import split_url
from .transport import AsyncTransport, Transport

if TYPE_CHECKING:
    from .grpc.address import GrpcAddress

__all__ = ["Connectable", "connect", "connect_async"]


@runtime_checkable
class Connectable(Protocol):
    """What clients take in place of a URL, and ask for their connection: a server that is no address."""

    def connect(self) -> Transport:
        """Return a transport for threads."""

    def connect_async(self) -> AsyncTransport:
        """Return a transport for tasks of the running event loop."""


def connect(url: str | Connectable, tls: Tls | None) -> Transport:
    """Return a transport for threads, which sends nothing yet; CallerError if the URL is none.

    ModuleNotFoundError if what this protocol needs is not installed.
    """
    if isinstance(url, Connectable):
        return url.connect()
    protocol, address, host, tls = _read(url, tls)
    if protocol == "grpc":
        with what_is_missing_told():
            from .grpc.transport import GrpcTransport  # noqa: PLC0415
        return GrpcTransport(_grpc_address(address, host, tls))
    with what_is_missing_told():
        from .http.transport import HttpTransport  # noqa: PLC0415
    return HttpTransport(address, host, tls)


def connect_async(url: str | Connectable, tls: Tls | None) -> AsyncTransport:
    """Return a transport for tasks of the running event loop; otherwise as :func:`connect`."""
    if isinstance(url, Connectable):
        return url.connect_async()
    protocol, address, host, tls = _read(url, tls)
    if protocol == "grpc":
        with what_is_missing_told():
            from .grpc.transport import AsyncGrpcTransport  # noqa: PLC0415
        return AsyncGrpcTransport(_grpc_address(address, host, tls))
    with what_is_missing_told():
        from .http.transport import AsyncHttpTransport  # noqa: PLC0415
    return AsyncHttpTransport(address, host, tls)


def _grpc_address(target: str, host: str, tls: Tls | None) -> GrpcAddress:
    from .grpc.address import GrpcAddress, tls_credentials  # noqa: PLC0415

    return GrpcAddress(target, host, None if tls is None else tls_credentials(tls))


def _read(url: str, tls: Tls | None) -> tuple[str, str, str, Tls | None]:
    protocol, is_secure, address, host = split_url(url)
    return protocol, address, host, (tls or Tls()) if is_secure else None
