"""Requests and their codec: a client's messages to a server, for every protocol."""

from __future__ import annotations

import contextlib
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy.typing as npt

from ...errors import CallerError
from ..options import RequestOptions

__all__ = ["Codec", "InputTensor", "Place", "Question", "split_url"]

Question = Literal[
    "server live",
    "server ready",
    "server metadata",
    "repository index",
    "model ready",
    "model metadata",
    "model config",
    "model statistics",
]
"""The questions that a client may ask a server about the server and its models."""


class Place(NamedTuple):
    """Bytes of a region that is registered at the server."""

    region: str
    offset: int
    byte_size: int


class InputTensor(NamedTuple):
    """One input; ``content`` travels with the request, unless it is a place. Strings are an array of ``bytes``."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: npt.NDArray[Any] | Place


class Codec(ABC):
    """Makes the messages that a transport of the same protocol sends, each once, and reads the answers. No I/O."""

    address: str = ""
    """The server's address with its scheme; empty for a server that has none, and whose processes are not visible."""
    needs_grpcio: str | None = None
    """Why grpcio carries all calls; empty if this client's sockets carry most, None if neither does."""

    reads_plain_outputs: ClassVar[bool] = False
    inline_bytes: ClassVar[int]
    """With up to this many bytes of tensors, an inline request is faster than one with a slot: ``docs/bench.md``."""

    @abstractmethod
    def infer(
        self,
        model: str,
        options: RequestOptions,
        *,
        inputs: Sequence[InputTensor] = (),
        outputs: Mapping[str, Place | None] | None = None,  # None for all; outputs without a place come in the response
        batch_size: int | None = None,  # sent as the batch carrier's shape if no input shows it
        slot: tuple[str, int] | None = None,
    ) -> Any:
        """Return a request's message; ``slot`` is an address and a generation. CallerError if it cannot be sent."""

    def for_slot(
        self, model: str, address: str, outputs: Iterable[str] | None, batch_size: int | None, options: RequestOptions
    ) -> Callable[[int], Any]:
        """Return a function that takes a generation and makes the message of a slot's request.

        The caller sends each message before it makes the next.
        """
        wanted = None if outputs is None else dict.fromkeys(outputs)
        return lambda number: self.infer(model, options, outputs=wanted, batch_size=batch_size, slot=(address, number))

    @abstractmethod
    def ask(self, question: Question, model: str = "", version: str = "") -> Any:
        """Return the message of a question."""

    @abstractmethod
    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> Any:
        """Return the message that loads or reloads a model; ``parameters`` are those of Triton's load request."""

    @abstractmethod
    def unload(self, model: str, *, dependents: bool) -> Any:
        """Return the message that unloads a model."""

    @abstractmethod
    def register(self, name: str, key: str, byte_size: int) -> Any:
        """Return the message that registers shared memory at the server, as a whole."""

    @abstractmethod
    def unregister(self, name: str) -> Any:
        """Return the message that undoes a registration."""

    @abstractmethod
    def result(self, answer: Any) -> Any:
        """Return the answer to a request as tritonclient's ``InferResult``."""

    def plain_outputs(self, answer: Any) -> Mapping[str, tuple[str, Sequence[int], bytes]]:
        """Return data type, shape and bytes of an answer's outputs, by their names, if ``reads_plain_outputs``."""
        return {}

    @abstractmethod
    def as_dict(self, answer: Any) -> dict[str, Any]:
        """Return the answer to a question in JSON's types, of one shape whatever the protocol."""

    @abstractmethod
    def says_so(self, answer: Any) -> bool:
        """Return whether the answer to a question is yes. A server may also say no by an error."""

    @abstractmethod
    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the data type and shape that a response gives an output; None if the response lacks the output."""


def split_url(url: str) -> tuple[str, bool, str, str]:
    """Return protocol (``"grpc"`` or ``"http"``), whether with TLS, address, and host; CallerError if it is no URL."""
    if not isinstance(url, str):
        raise CallerError(f"the URL is {url!r}; expected a str, for example 'localhost:8001'")
    scheme, _, address = (url if "://" in url else f"grpc://{url}").partition("://")
    scheme, address = scheme.lower(), address.rstrip("/")
    protocol = scheme.removesuffix("s")
    host: str | None = None
    port: int | None = 0
    with contextlib.suppress(ValueError):  # address or host cannot be encoded, or the port is not a number or too large
        address.encode()
        parts = urllib.parse.urlsplit(f"//{address}")
        (parts.hostname or "").encode("idna")
        host = parts.hostname
        port = parts.port
    if protocol not in ("grpc", "http") or not host:
        raise CallerError(
            f"URL {url!r} does not name a server; expected HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT "
            "for HTTP, grpcs:// or https:// with TLS"
        )
    if port == 0:
        raise CallerError(f"URL {url!r} has no valid port; expected 1 to 65535, and brackets around an IPv6 address")
    if protocol == "grpc" and "/" in address:
        raise CallerError(
            f"URL {url!r} has a path, but gRPC has none; expected HOST:PORT, or http://HOST:PORT for HTTP"
        )
    has_tls = scheme.endswith("s")
    if protocol == "grpc" and port is None and not has_tls:  # gRPC would take 443, the port of TLS
        raise CallerError(f"URL {url!r} names no port; Triton's gRPC is on 8001 by default: {f'{address}:8001'!r}")
    return protocol, has_tls, address, host
