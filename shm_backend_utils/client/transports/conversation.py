"""A server's address, and a conversation, which turns requests into bytes and bytes into answers. No I/O."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, NamedTuple

from ...errors import translate
from ...memory.descriptors import NO_DESCRIPTORS, no_descriptors
from ..errors import ServerUnavailableError, unavailable

__all__ = ["MOST_SENDINGS", "Conversation", "Server", "Unanswered", "translate_handshake"]


class Unanswered(NamedTuple):
    """A request that gets no answer. It may be sent again only if it certainly has not begun."""

    reason: str  # for people
    may_have_begun: bool


class Conversation(ABC):
    """A connection sends the bytes in ``out``, and gives received bytes to :meth:`receive`."""

    is_shared: ClassVar[bool]
    """Whether several requests may be under way at once."""

    out: list[bytes | memoryview]
    """The bytes to send, in order. The connection clears the list."""
    ended: dict[int, Any]
    """Answers, or :class:`Unanswered`, by the numbers of their requests. The connection takes each one out."""
    is_ready: bool
    """Whether requests may begin: the server is known to speak the protocol."""
    failure: str
    """Why the connection is of no more use, for messages; empty while it is usable."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another request may begin now."""

    @abstractmethod
    def begin(self, request: Any, timeout_s: float) -> int:
        """Begin a request, and return its number."""

    @abstractmethod
    def receive(self, data: bytes) -> None:
        """Take bytes from the server; no bytes if it has closed the connection. Never raises."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Forget a request whose caller no longer waits."""


MOST_SENDINGS: Final = 3
"""How many times to send a request that does not begin."""


class Server(NamedTuple):
    host: str
    port: int
    address: str  # for messages to people
    conversation: type[Conversation]
    tls: ssl.SSLContext | None = None

    def unreachable(self, error: OSError, *, is_connected: bool) -> Exception:
        """Return the client's error for a socket's error; a ServerUnavailableError stays as it is."""
        if isinstance(error, ServerUnavailableError):
            return error
        if error.errno in NO_DESCRIPTORS:
            return no_descriptors("a connection to a server takes a file descriptor")
        doing = "" if is_connected else "failed to connect: "
        return unavailable(self.address, f"{doing}{type(error).__name__}: {error.strerror or error}")

    def check_takes_requests(self, conversation: Conversation) -> None:
        """Raise ServerUnavailableError if a new connection takes no requests."""
        if not conversation.has_room:
            raise unavailable(self.address, conversation.failure or "failed to connect: it takes no requests")

    def unanswered(self, outcome: Unanswered) -> Exception:
        doing = "" if outcome.may_have_begun else "failed to connect: "
        return unavailable(self.address, f"{doing}{outcome.reason}")


def translate_handshake() -> translate[OSError]:
    """Name the TLS handshake in its errors: a server without TLS may end the handshake by any error."""
    return translate(
        (ssl.SSLError, ConnectionResetError), lambda error: OSError(f"TLS handshake: {type(error).__name__}: {error}")
    )
