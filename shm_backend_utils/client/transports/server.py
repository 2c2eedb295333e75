"""A server as connections to it need it, and what failures of theirs mean."""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple

from ...memory.descriptors import NO_DESCRIPTORS, no_descriptors
from ...telling import telling
from ..errors import ServerUnavailableError, unavailable
from .conversation import Conversation, Unanswered

__all__ = ["MOST_ATTEMPTS", "Server", "handshake_told"]

MOST_ATTEMPTS: Final = 3
"""So often a request is sent that never begins."""


class Server(NamedTuple):
    """Where a server is, and how to speak to it."""

    host: str
    port: int
    address: str  # for messages to people
    conversation: type[Conversation]
    tls: ssl.SSLContext | None = None

    def unreachable(self, error: OSError, *, is_connected: bool) -> Exception:
        """Return the error for what a socket raises; a refusal as it is."""
        if isinstance(error, ServerUnavailableError):
            return error
        if error.errno in NO_DESCRIPTORS:
            return no_descriptors("a connection to a server takes a file descriptor")
        doing = "" if is_connected else "failed to connect: "
        return unavailable(self.address, f"{doing}{type(error).__name__}: {error.strerror or error}")

    def refusal(self, conversation: Conversation) -> Exception | None:
        """Return the error for a connection that has just been made and takes no request; None if it takes one."""
        if conversation.has_room and not conversation.failure:
            return None
        return unavailable(self.address, conversation.failure or "failed to connect: it takes no requests")

    def unanswered(self, outcome: Unanswered) -> Exception:
        """Return the error for a request without an answer."""
        doing = "" if outcome.may_have_begun else "failed to connect: "
        return unavailable(self.address, f"{doing}{outcome.reason}")


def handshake_told() -> telling[OSError]:
    """Have errors say that they are of TLS: how a server without it ends a handshake, is chance."""
    return telling(
        (ssl.SSLError, ConnectionResetError),
        lambda error: OSError(f"TLS handshake: {type(error).__name__}: {error}"),
    )
