"""What a server answers instead of a result; each is also an exception that users of ``tritonclient`` catch."""

from __future__ import annotations

from typing import Final

from tritonclient.utils import InferenceServerException

from ..errors import MachineError, PeerError, ShmError

__all__ = ["DeadlineExceededError", "InferenceError", "ServerUnavailableError", "translated"]

_DEADLINE: Final = "StatusCode.DEADLINE_EXCEEDED"
_UNAVAILABLE: Final = "StatusCode.UNAVAILABLE"


class InferenceError(InferenceServerException, PeerError):
    """The server refused or failed the request. ``status()`` and ``message()`` tell what it said."""

    def __init__(self, message: str, status: str | None = None) -> None:
        InferenceServerException.__init__(self, message, status)


class DeadlineExceededError(InferenceError, TimeoutError):
    """The server did not answer in time. The model may still be running."""


class ServerUnavailableError(InferenceServerException, MachineError, ConnectionError):
    """No server answers there, or the connection broke."""

    def __init__(self, message: str, status: str | None = None) -> None:
        InferenceServerException.__init__(self, message, status)


def translated(error: InferenceServerException, address: str) -> ShmError:
    """Return tritonclient's exception as one of ours."""
    status = error.status()
    message = error.message() or "the server gave no reason"
    if status == _DEADLINE:
        return DeadlineExceededError("the server did not answer before the deadline", status)
    if status == _UNAVAILABLE and _is_of_the_channel(message):
        return unavailable(address, message)
    return InferenceError(message, status)


def unavailable(address: str, reason: str) -> ServerUnavailableError:
    """Return the error for a server that cannot be reached."""
    return ServerUnavailableError(
        f"no Triton server answers at {address} ({reason}); is it running, and is this its port? "
        "By default gRPC is on 8001 and HTTP on 8000",
        _UNAVAILABLE,
    )


def _is_of_the_channel(message: str) -> bool:
    """Return whether gRPC says that it has no connection, rather than a server that a model is unavailable."""
    return any(words in message for words in ("failed to connect", "Connection re", "DNS resolution", "Socket closed"))
