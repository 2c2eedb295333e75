"""Where a server is over gRPC, and how a channel to it is made."""

from __future__ import annotations

import re
import select
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from ....memory.descriptors import translate_os_errors
from ...errors import proxy_for
from ...options import Tls
from ..conversation import Server
from .http2 import Http2

__all__ = ["CHANNEL_OPTIONS", "GrpcAddress", "tls_credentials"]

CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Messages of any size, as tritonclient has it; and a server that was restarted is found again at once: by default gRPC
waits longer after each attempt, up to two minutes."""


_DESCRIPTORS: Final = 10
_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):[0-9]+")  # HOST:PORT


@dataclass(frozen=True)
class GrpcAddress:
    target: str  # as gRPC takes it: ``HOST:PORT``, or with a scheme of gRPC's in front
    host: str  # the machine in it
    credentials: Any = None  # ``grpc.ChannelCredentials``; None without TLS
    options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS  # the channel's arguments, in gRPC's words

    @translate_os_errors(f"a connection over gRPC takes {_DESCRIPTORS} file descriptors", "gRPC cannot work here: {}")
    def channel(self, module: Any) -> Any:
        """Open a channel of ``grpc`` or ``grpc.aio``, if there are file descriptors: without, gRPC ends the process."""
        for each in [select.epoll() for _ in range(_DESCRIPTORS)]:
            each.close()
        if self.credentials is None:
            return module.insecure_channel(self.target, options=self.options)
        return module.secure_channel(self.target, self.credentials, options=self.options)

    def needs_grpcio(self) -> str:
        """Return why unary calls go over a channel of gRPC's; empty if this client's own sockets do."""
        if self.credentials is not None:
            return "TLS"
        if self.options is not CHANNEL_OPTIONS:
            return "options of the channel"
        if _PLACE.fullmatch(self.target) is None:
            return "an address in gRPC's own words"
        proxy = proxy_for(str(self))
        return f"the proxy in the environment variable {proxy}" if proxy else ""

    def server(self) -> Server:
        place = urllib.parse.urlsplit(f"//{self.target}")
        return Server(place.hostname or "", place.port or 0, str(self), Http2)

    def __str__(self) -> str:
        return f"{'grpc' if self.credentials is None else 'grpcs'}://{self.target}"


def tls_credentials(tls: Tls) -> Any:
    """Return certificates as gRPC takes them; raises OSError if one cannot be read."""
    return grpc.ssl_channel_credentials(
        _content(tls.root_certificates), _content(tls.private_key), _content(tls.certificate_chain)
    )


def _content(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()
