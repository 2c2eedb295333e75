"""gRPC and HTTP, blocking and not, in one shape: send a request, ask the server something."""

from __future__ import annotations

import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CallerError
from .options import RequestOptions

__all__ = ["InputTensor", "OutputTensor", "Place", "Request", "Transport", "split_url"]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a region that is registered at the server."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input; ``content`` travels with the request, unless it is a place."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: npt.NDArray[Any] | Place


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output that is wanted; it travels with the response, unless it has a place."""

    name: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``outputs`` is None for all that the model has."""

    model: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[OutputTensor] | None
    parameters: Mapping[str, Any]
    options: RequestOptions


class Transport(ABC):
    """A connection to a server. What goes wrong is one of our errors.

    Attributes
    ----------
    address : str
        With its scheme, for messages.
    host : str
        As in the URL.
    """

    address: str
    host: str
    _module: Any

    @abstractmethod
    def encode(self, request: Request) -> Any:
        """Return a request as :meth:`infer` takes it. It can be sent again, once it was answered."""

    @abstractmethod
    async def infer(self, message: Any, timeout_s: float, generation: int = 0) -> Any:
        """Send an encoded request and return tritonclient's ``InferResult``; ``generation`` is added if it is not 0.

        Raises
        ------
        InferenceError
            The server answered with an error.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        """

    @abstractmethod
    async def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """Return a model's configuration in JSON's types; raises what :meth:`infer` raises."""

    @abstractmethod
    async def register(self, name: str, key: str, byte_size: int, timeout_s: float) -> None:
        """Register shared memory at the server, as a whole; raises what :meth:`infer` raises."""

    @abstractmethod
    async def unregister(self, name: str, timeout_s: float) -> None:
        """Undo a registration, if there is one; raises what :meth:`infer` raises."""

    @abstractmethod
    def stream(self, request: Request, patience_s: float) -> AsyncGenerator[Any, None]:
        """Send a request and return the responses as they come; ``patience_s`` is the longest wait for the next."""

    @abstractmethod
    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return an output's data type and shape as the response says; None if it does not have this output."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""

    def _arguments(self, request: Request) -> dict[str, Any]:
        """Return a request as arguments of ``infer`` of any of tritonclient's clients."""
        options: dict[str, Any] = {**request.options}
        options.pop("compression", None)
        if "headers" in options:
            options["headers"] = dict(options["headers"])  # tritonclient adds some of its own
        outputs = request.outputs
        return {
            **options,
            "model_name": request.model,
            "inputs": [self._input(tensor) for tensor in request.inputs],
            "outputs": None if outputs is None else [self._output(tensor) for tensor in outputs],
            "parameters": {**options.get("parameters", {}), **request.parameters},
        }

    def _input(self, tensor: InputTensor) -> Any:
        made = self._module.InferInput(tensor.name, list(tensor.shape), tensor.datatype)
        if isinstance(tensor.content, Place):
            made.set_shared_memory(tensor.content.region, tensor.content.byte_size, tensor.content.offset)
        else:
            made.set_data_from_numpy(np.asarray(tensor.content))
        return made

    def _output(self, tensor: OutputTensor) -> Any:
        made = self._module.InferRequestedOutput(tensor.name)
        if tensor.place is not None:
            made.set_shared_memory(tensor.place.region, tensor.place.byte_size, tensor.place.offset)
        return made


def split_url(url: str) -> tuple[str, bool, str, str]:
    """Return protocol (``"grpc"`` or ``"http"``), whether with TLS, the address, and the host in it.

    Raises
    ------
    CallerError
        The URL is not one of a server.
    """
    scheme, separator, address = url.partition("://")
    if not separator:
        scheme, address = "grpc", url
    protocol = scheme.removesuffix("s")
    address = address.rstrip("/")
    try:
        parts = urllib.parse.urlsplit(f"//{address}")
        host, _ = parts.hostname, parts.port
    except ValueError:  # no number, or too large a one
        host = None
    if protocol not in ("grpc", "http") or not host:
        raise CallerError(
            f"URL {url!r} is not one of a server; expected HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT "
            "for HTTP, grpcs:// or https:// with TLS"
        )
    return protocol, scheme.endswith("s"), address, host
