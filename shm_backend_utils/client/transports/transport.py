"""Connections to a server: how a message is sent, and its answer waited for. Blocking and not, they differ in that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from typing import Any

from .messages import Codec

__all__ = ["AsyncTransport", "Transport"]


class _Connection(ABC):
    codec: Codec  # makes the messages that it sends
    address: str  # with its scheme, for messages to people
    host: str  # as in the URL


class Transport(_Connection):
    """For threads; may be used from several at once. Every failure is one of our errors."""

    @abstractmethod
    def send(self, message: Any, timeout_s: float) -> Any:
        """Send a message and return the answer, as its codec reads it; InferenceError if that is an error.

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
    """For tasks of one event loop, which must be running when it is made."""

    @abstractmethod
    async def send(self, message: Any, timeout_s: float) -> Any:
        """As :meth:`Transport.send`."""

    @abstractmethod
    def stream(self, message: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        """As :meth:`Transport.stream`."""

    @abstractmethod
    async def close(self) -> None:
        """As :meth:`Transport.close`."""
