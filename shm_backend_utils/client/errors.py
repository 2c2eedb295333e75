"""Errors between a client and its server; failed requests raise subclasses of tritonclient's exception."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Final

from tritonclient.utils import InferenceServerException

from ..errors import (
    BudgetError,
    CallerError,
    ClosedError,
    MachineError,
    MissingTensorError,
    PeerError,
    PoolExhaustedError,
    ShmError,
    code_in,
)

__all__ = [
    "BudgetError",
    "ConnectionLostError",
    "DeadlineExceededError",
    "ForkedError",
    "InferenceError",
    "InputMissingError",
    "LivenessUnknownError",
    "MemoryRefusedError",
    "OutputRoomError",
    "PathUnavailableError",
    "PoolExhaustedError",
    "ServerUnavailableError",
    "TimeoutValueError",
    "TlsError",
    "UnknownHostError",
    "deadline_exceeded",
    "proxy_for",
    "translated",
    "unavailable",
]

_DEADLINE: Final = "StatusCode.DEADLINE_EXCEEDED"
_UNAVAILABLE: Final = "StatusCode.UNAVAILABLE"


class _OfServerError(InferenceServerException):
    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message, status)
        self.args = (message, status)


class InferenceError(_OfServerError, PeerError):
    """The server refused or failed the request. ``status()`` and ``message()`` quote it."""


class DeadlineExceededError(InferenceError, TimeoutError):
    """The call's time ran out. If the request was sent, the model may still be running."""


class OutputRoomError(InferenceError, ValueError):
    """An output needs more bytes than the call's hint gave it, on a path where it cannot come back another way."""


class InputMissingError(InferenceError, MissingTensorError):
    """The model needs an input that the request lacks, although its configuration declares all inputs optional."""

    def __init__(self, message: str, status: str | None, tensor: str) -> None:
        """Keep the server's message. ``tensor`` names the input; it is empty if the message names none."""
        InferenceError.__init__(self, message, status)
        self.tensor = tensor


class MemoryRefusedError(InferenceError):
    """The server or the model could not open the call's shared memory. The model has not run."""


class LivenessUnknownError(PeerError):
    """The server reports a model as ready, but the client cannot tell whether the model's process is alive."""


class ServerUnavailableError(_OfServerError, MachineError, ConnectionError):
    """The server cannot be reached, or is not ready. The request did not reach it."""


class ConnectionLostError(ServerUnavailableError):
    """The connection broke before the answer came. The model may have run, or be running."""


class UnknownHostError(ServerUnavailableError):
    """This machine cannot resolve the host name in the URL."""


class TlsError(ServerUnavailableError):
    """Client and server do not agree on TLS: only one speaks it, or one does not trust the other's certificate."""


class PathUnavailableError(CallerError):
    """The path that you named is closed, or with ``"auto"`` all are; the message gives the reason and the remedy."""


class TimeoutValueError(CallerError, ValueError):
    """A time limit is not a number of seconds above 0 and at most a year."""


class ForkedError(ClosedError):
    """The client belongs to the process that this one was forked from; its memory and connection do not work here."""

    def __init__(self, what: str) -> None:
        CallerError.__init__(
            self, f"{what} belongs to the process that this one was forked from; make a new one in this process"
        )


def translated(status: str | None, message: str, address: str) -> ShmError:
    """Return an error of a server as one of ours; the status is gRPC's, as ``"StatusCode.UNAVAILABLE"``, or HTTP's."""
    message = message or "the server gave no reason"
    if status == _DEADLINE:
        return deadline_exceeded(address)
    if (status == _UNAVAILABLE and _OF_THE_CHANNEL.search(message)) or "RST_STREAM" in message:
        return unavailable(address, message)
    if code_in(message) == MissingTensorError.code:
        named = _NAME.search(message)
        return InputMissingError(message, status, "" if named is None else named[1])
    if _DEAD_STUB.search(message):
        message += f" {_OF_DEAD_STUBS}"
    return InferenceError(message, status)


def deadline_exceeded(address: str = "") -> DeadlineExceededError:
    return DeadlineExceededError(
        "the server did not answer before the deadline; raise timeout_s, or check that model.py answers"
        f"{_of_proxies(address)}",
        _DEADLINE,
    )


NOT_SENT: Final = "its request was not sent"
ANSWERED: Final = "the model has answered"


def out_of_time(doing: str, request: str = NOT_SENT) -> DeadlineExceededError:
    """Return the error for a call whose time ran out; ``doing`` names the step, ``request`` its state."""
    return DeadlineExceededError(f"the call's time ran out while {doing}; {request}", _DEADLINE)


def stream_held(model: str) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"model {model!r} has no free frame for its next response: this client holds a result in each frame of the "
        "stream. Release results (leave their with blocks), keep copies (result.copy()), or ask for more frames",
        _DEADLINE,
    )


def unavailable(address: str, reason: str) -> ServerUnavailableError:
    """Return the error for a server that the client cannot reach, or has lost."""
    if _NOT_HTTP.search(reason):
        return ServerUnavailableError(  # leaves out the reason, which quotes the received bytes
            f"the server at {address} does not speak HTTP, or only with TLS (https://); check the port. Triton's HTTP "
            "is on 8000 by default, and its gRPC on 8001, as grpc://HOST:PORT",
            _UNAVAILABLE,
        )
    found = (each[1:] for each in _REASONS if each[0].search(reason))
    kind, template = next(found, (ServerUnavailableError, _NOBODY))
    return kind(f"{template.format(address=address)} ({reason}){_of_proxies(address)}", _UNAVAILABLE)


def proxy_for(address: str) -> str:
    """Return the environment variable that makes gRPC use a proxy for an address; empty if none does."""
    name = next((name for name in _PROXIES if os.environ.get(name)), "")
    host = urllib.parse.urlsplit(address).hostname
    excluded = next(filter(None, map(os.environ.get, _EXCLUDING)), "").split(",")
    return "" if not host or any(each.strip() and host.endswith(each.strip()) for each in excluded) else name


def _of_proxies(address: str) -> str:
    """Return a hint on a proxy in the environment; it names only the variable, as the value may have a password."""
    name = proxy_for(address)
    if not name:
        return ""
    host = urllib.parse.urlsplit(address).hostname
    if address.startswith("http"):
        return f"; over HTTP this client uses no proxy, and ignores the environment variable {name}"
    return f"; gRPC uses the proxy in the environment variable {name}; to connect without it, set no_proxy={host}"


_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCLUDING: Final = ("no_grpc_proxy", "no_proxy")
_NOBODY: Final = (
    "no Triton server answers at {address}; is it running, and is this its port? "
    "By default gRPC is on 8001 and HTTP on 8000"
)
_DEAD_STUB: Final = re.compile(r"(?i)stub process \S+ is not healthy\.$")
_OF_DEAD_STUBS: Final = (
    "The model's process has died; the server's log or the kernel's log has the cause. Load the model again, or "
    "restart the server"
)
_NOT_HTTP: Final = re.compile(r"(?i)bad ?status ?line")
# Error texts of gRPC, sockets and httptools, from the most specific to the least.
_REASONS: Final[tuple[tuple[re.Pattern[str], type[ServerUnavailableError], str], ...]] = (
    (
        re.compile(r"\[SSL|SSL_ERROR|SSL routines|CERTIFICATE_VERIFY|WRONG_VERSION_NUMBER|(?i:(ssl|tls) handshake)"),
        TlsError,
        "no TLS connection to {address}: use grpcs:// or https:// only where the server speaks TLS, and give "
        "ShmClient(tls=Tls(root_certificates=...)) if its certificate is not signed by a known authority",
    ),
    (
        re.compile(
            r"(?i)DNS resolution|errors resolving|name or service|getaddrinfo|name resolution|"
            r"no address associated|domain name not found"
        ),
        UnknownHostError,
        "this machine cannot resolve the host name in {address}; check its spelling",
    ),
    (re.compile(r"(?i)Connection refused|Connect call failed"), ServerUnavailableError, _NOBODY),
    (
        re.compile(r"(?i)http1.x server|Failed parsing HTTP/2"),
        ServerUnavailableError,
        "the server at {address} speaks HTTP, and not gRPC; check the port. Triton's gRPC is on 8001 by default, its "
        "HTTP on 8000, as http://HOST:PORT",
    ),
    (
        re.compile(r"(?i)failed to connect"),
        ServerUnavailableError,
        "no Triton server answers at {address} as it should; is this its port for this protocol (by default gRPC is on "
        "8001, and HTTP on 8000, as http://HOST:PORT), and does it speak TLS (grpcs://, https://)?",
    ),
    (
        re.compile(
            r"(?i)reset by peer|socket closed|connection closed|disconnected|broken pipe|connectionclosed|GOAWAY|"
            r"http2 header with status|upstream|IncompleteRead|RST_STREAM"
        ),
        ConnectionLostError,
        "the connection to {address} broke before the answer came; the model may have run. Is the server still "
        "running, and does it speak TLS (grpcs://, https://)?",
    ),
)
# Only these texts: a server also says "unavailable" of a *model*, and that is an answer.
_OF_THE_CHANNEL: Final = re.compile(
    r"(?i)failed to connect|Connection re|DNS resolution|errors resolving|Socket closed|connection closed|"
    r"SSL_ERROR|handshake|GOAWAY|Broken pipe|http2 header with status|upstream (?:request|connect)"  # also of proxies
)
_NAME: Final = re.compile(r"has no input '([^']*)'")
