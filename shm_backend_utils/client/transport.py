"""gRPC and HTTP in one shape: send a request, read a model's configuration. Only this module knows which it is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from ..errors import CallerError, ShmError
from ..spec import BATCH_CARRIER
from .errors import DeadlineExceededError, translated, unavailable

__all__ = ["GrpcTransport", "HttpTransport", "Request", "Transport", "connect"]


@dataclass(frozen=True)
class Request:
    """One request without tensor bytes.

    Attributes
    ----------
    batch_size : int or None
        Sent as the shape of the batch carrier; None for a model without a batch dimension.
    outputs : tuple of str or None
        What to request; None for all.
    """

    model: str
    batch_size: int | None
    outputs: tuple[str, ...] | None
    parameters: Mapping[str, Any]
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)


class Transport(ABC):
    """A connection to a server. May be used from several threads at once.

    Attributes
    ----------
    address : str
        With its scheme, for messages.
    """

    address: str
    _module: Any

    def infer(self, request: Request) -> Any:
        """Send the request and return tritonclient's ``InferResult``.

        Raises
        ------
        InferenceError
            The server answered with an error.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        """
        inputs = [] if request.batch_size is None else [self._batch_carrier(request.batch_size)]
        outputs = request.outputs and [self._module.InferRequestedOutput(name) for name in request.outputs]
        try:
            return self._infer(
                request.timeout_s,
                model_name=request.model,
                inputs=inputs,
                outputs=outputs,
                parameters=request.parameters,
                **request.options,
            )
        except ShmError:
            raise
        except InferenceServerException as error:
            raise translated(error, self.address) from None

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        """Return a model's configuration in JSON's types; raises what :meth:`infer` raises."""
        try:
            return self._model_config(model, version)
        except ShmError:
            raise
        except InferenceServerException as error:
            raise translated(error, self.address) from None

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def _infer(self, timeout_s: float, **arguments: Any) -> Any: ...

    @abstractmethod
    def _model_config(self, model: str, version: str) -> dict[str, Any]: ...

    def _batch_carrier(self, batch_size: int) -> Any:
        carrier = self._module.InferInput(BATCH_CARRIER, [batch_size, 0], "UINT8")
        carrier.set_data_from_numpy(np.empty((batch_size, 0), np.uint8))
        return carrier


class GrpcTransport(Transport):
    """Over gRPC."""

    def __init__(self, url: str, timeout_s: float) -> None:
        import tritonclient.grpc as module  # noqa: PLC0415  # so that an installation with HTTP alone is enough

        self.address = f"grpc://{url}"
        self._module = module
        self._timeout_s = timeout_s
        self._client = module.InferenceServerClient(url)

    def close(self) -> None:
        self._client.close()

    def _infer(self, timeout_s: float, **arguments: Any) -> Any:
        return self._client.infer(client_timeout=timeout_s, **arguments)

    def _model_config(self, model: str, version: str) -> dict[str, Any]:
        reply = self._client.get_model_config(model, version, as_json=True, client_timeout=self._timeout_s)
        config: dict[str, Any] = reply["config"]
        return config


class HttpTransport(Transport):
    """Over HTTP. tritonclient's client is bound to the thread that made it, so every thread has one of its own."""

    def __init__(self, url: str, timeout_s: float) -> None:
        import gevent  # noqa: PLC0415
        import tritonclient.http as module  # noqa: PLC0415

        self.address = f"http://{url}"
        self._module = module
        self._deadline = gevent.Timeout
        self._url = url
        self._timeout_s = timeout_s
        self._of_thread = threading.local()

    def close(self) -> None:
        self._drop_client()

    def _infer(self, timeout_s: float, **arguments: Any) -> Any:
        return self._ask(timeout_s, lambda client: client.infer(**arguments))

    def _model_config(self, model: str, version: str) -> dict[str, Any]:
        config: dict[str, Any] = self._ask(self._timeout_s, lambda client: client.get_model_config(model, version))
        return config

    def _ask(self, timeout_s: float, question: Any) -> Any:
        try:
            with self._deadline(timeout_s):
                return question(self._client())
        except self._deadline:
            self._drop_client()  # its connection still waits for the late answer
            raise DeadlineExceededError("the server did not answer before the deadline") from None
        except OSError as error:
            self._drop_client()
            raise unavailable(self.address, error.strerror or type(error).__name__) from None
        except HTTPException as error:  # the server died, or it is no HTTP that is spoken there
            self._drop_client()
            raise unavailable(self.address, f"{type(error).__name__}: {error}") from None

    def _client(self) -> Any:
        client = getattr(self._of_thread, "client", None)
        if client is None:
            client = self._of_thread.client = self._module.InferenceServerClient(self._url)
        return client

    def _drop_client(self) -> None:
        client = self._of_thread.__dict__.pop("client", None)
        if client is not None:
            client.close()


def connect(url: str, timeout_s: float) -> Transport:
    """Return a transport for ``HOST:PORT`` (gRPC), ``grpc://HOST:PORT`` or ``http://HOST:PORT``. Sends nothing."""
    scheme, separator, address = url.partition("://")
    if not separator:
        scheme, address = "grpc", url
    if scheme == "grpc":
        return GrpcTransport(address, timeout_s)
    if scheme == "http":
        return HttpTransport(address, timeout_s)
    raise CallerError(f"URL {url!r} has scheme {scheme!r}; expected HOST:PORT, grpc://HOST:PORT or http://HOST:PORT")
