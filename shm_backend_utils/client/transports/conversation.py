"""What is said over one connection to a server, without its I/O: requests become bytes, and bytes become answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

__all__ = ["Conversation", "Unanswered"]


class Unanswered(NamedTuple):
    """A request that gets no answer. It may be sent again, if it has not begun for certain."""

    reason: str  # for people
    may_have_begun: bool


class Conversation(ABC):
    """A connection sends what is in ``out``, and gives what it receives to :meth:`receive`."""

    is_shared: ClassVar[bool]
    """Whether several requests may be under way at once."""

    out: list[bytes | memoryview]
    """What is to be sent, in order. The connection clears the list."""
    ended: dict[int, Any]
    """Answers, or :class:`Unanswered`, by the numbers of their requests. The connection takes them out."""
    is_ready: bool
    """Whether requests may begin: the server is known to speak the protocol."""
    failure: str
    """Why the connection is of no more use, for people; empty as long as it is."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another request may begin now."""

    @abstractmethod
    def begin(self, request: Any, timeout_s: float) -> int:
        """Begin a request, and return its number."""

    @abstractmethod
    def receive(self, data: bytes) -> None:
        """Take what the server has sent; no bytes if it has closed the connection. Never raises."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Forget a request that nobody waits for any more."""
