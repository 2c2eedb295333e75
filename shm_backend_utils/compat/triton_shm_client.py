"""The class of ``triton-shm-client``, on this library's memory; ``docs/migrating.md`` lists the differences."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import re
import types
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy.typing as npt
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from ..client.errors import ForkedError
from ..client.options import RequestOptions, Tls, check_options
from ..client.transports.grpc.codec import Metadata
from ..client.transports.grpc.transport import CHANNEL_OPTIONS, GrpcAddress, GrpcTransport, tls_credentials
from ..errors import CallerError, ClosedError
from ..process import call_after_fork, never_destroy
from .registered_model import InferShmError, RegisteredModel, TensorDeclaration

__all__ = ["InferShmError", "OptionError", "TritonSHMClient"]

_LOG: Final = logging.getLogger(__name__)
_COMPRESSIONS: Final = ("gzip", "deflate")
_UNIX_SOCKET: Final = re.compile(r"^unix(-abstract)?:")
_SCHEME: Final = re.compile(r"^(dns|ipv4|ipv6):")


class TritonSHMClient(tritonclient.grpc.InferenceServerClient):
    """tritonclient's gRPC client, with the same arguments, plus inference through shared memory.

    It works with every model on the server: those that have a ``ShmSession`` read and write the memory themselves; for
    others, the server copies. ``registered_models`` has the registered models by name.
    """

    def __init__(
        self,
        url: str,
        verbose: bool = False,
        ssl: bool = False,
        root_certificates: str | None = None,
        private_key: str | None = None,
        certificate_chain: str | None = None,
        creds: Any = None,
        keepalive_options: tritonclient.grpc.KeepAliveOptions | None = None,
        channel_args: Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        self.registered_models: dict[str, RegisteredModel] = {}
        self._is_closed = False
        self._is_forked = False
        files = root_certificates, private_key, certificate_chain
        super().__init__(url, verbose, ssl, *files, creds, keepalive_options, channel_args)
        if ssl and creds is None:
            creds = tls_credentials(Tls(*files))
        self._grpc_address = GrpcAddress(url, _host(url), creds, _channel_options(keepalive_options, channel_args))
        self._is_verbose = verbose
        self._at_exit = functools.partial(_unregister_all, self.registered_models)
        atexit.register(self._at_exit)
        call_after_fork(self)

    def register_shm_model(
        self,
        model_name: str,
        inputs: Sequence[TensorDeclaration],
        outputs: Sequence[TensorDeclaration],
        max_batch_size: int,
        pool_size: int,
    ) -> None:
        """Take memory for a model: now if it is loaded and the server shares memory, else at its first call.

        Parameters
        ----------
        model_name : str
            The model's name on the server.
        inputs, outputs : sequence of (name, shape, dtype)
            The tensors; shapes are those of a row, without the batch dimension. An output may be declared with another
            shape or dtype of the same size in bytes, and is then read that way. If an output is smaller than declared,
            the rest is zero.
        max_batch_size : int
            The most rows in one request.
        pool_size : int
            The most requests at once. Further calls wait.

        Raises
        ------
        ValueError, TypeError
            The model is registered already, or a declaration is wrong.
        InferenceServerException, MachineError, ClosedError
            The server does not answer, the machine lacks shared memory, or this client was closed.
        """
        self._check_is_open()
        if model_name in self.registered_models:
            raise _registered_already(model_name)
        transport = GrpcTransport(self._grpc_address, functools.partial(_plugged, weakref.ref(self)))
        model = RegisteredModel(transport, model_name, inputs, outputs, max_batch_size, pool_size)
        if self.registered_models.setdefault(model_name, model) is not model:  # another thread was faster
            model.close()
            raise _registered_already(model_name)
        try:
            self._check_is_open()
        except ClosedError:  # another thread has closed this client meanwhile
            self.cleanup_all_shm()
            raise

    def unregister_shm_model(self, model_name: str) -> None:
        """Give back a model's memory. An unknown model only causes a warning in the log."""
        model = self.registered_models.pop(model_name, None)
        if model is None:
            _LOG.warning("model %r is not registered, and cannot be unregistered", model_name)
        else:
            model.close()

    def cleanup_all_shm(self) -> None:
        """Unregister every model. Also done at exit, for clients that were never closed."""
        _unregister_all(self.registered_models)

    def infer_shm(
        self,
        model_name: str,
        inputs: Mapping[str, npt.NDArray[Any] | list[Any]],
        model_version: str = "",
        request_id: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        priority: int = 0,
        timeout: int | None = None,
        client_timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        compression_algorithm: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Run a registered model on any number of rows, in as many requests as it takes.

        Parameters
        ----------
        model_name : str
            The name of a registered model.
        inputs : mapping of str to numpy.ndarray or list
            Rows, the same number for each input. They are cast to the registered dtypes, and broadcast to
            the registered shapes.
        client_timeout : float, optional
            Seconds for each request; by default without a limit.
        model_version, request_id, sequence_id, sequence_start, sequence_end, priority, timeout, headers
            As of tritonclient's ``infer``; ``timeout`` is in microseconds.
        compression_algorithm, parameters
            As of tritonclient's ``infer``, too.

        Returns
        -------
        dict of str to numpy.ndarray
            The registered outputs, with their dtypes and all rows, as new, writable arrays.

        Raises
        ------
        ValueError, TypeError, KeyError
            The model is not registered, or the inputs do not fit it. Nothing was sent.
        OptionError, InferShmError
            An option has a value that cannot be sent; or a request failed.
        """
        model = self.registered_models.get(model_name)
        if model is None:
            raise ValueError(f"model {model_name!r} is not registered; call register_shm_model first")
        options = {
            "model_version": model_version,
            "request_id": request_id,
            "sequence_id": sequence_id,
            "sequence_start": sequence_start,
            "sequence_end": sequence_end,
            "priority": priority,
            "queue_timeout_us": timeout,
            "headers": headers,
            "compression": _known_compression(compression_algorithm),
            "parameters": parameters,
        }
        try:
            checked = check_options(cast(RequestOptions, {name: value for name, value in options.items() if value}))
        except CallerError as error:
            raise OptionError(str(error)) from None
        results = model.infer(inputs, client_timeout, checked)
        if self._is_verbose:
            print(f"infer_shm, model {model_name}, { ({name: array.shape for name, array in results.items()}) }")
        return results

    def close(self) -> None:
        """Unregister every model and close the connection. Twice is fine."""
        self._is_closed = True
        self.cleanup_all_shm()
        atexit.unregister(self._at_exit)
        if not self._is_forked:
            super().close()

    def after_fork(self) -> None:
        """Do not touch the connection in a forked child: it is the parent's."""
        self._is_forked = True
        never_destroy(self)

    def _check_is_open(self) -> None:
        if self._is_forked:
            raise ForkedError("this client")
        if self._is_closed:
            raise ClosedError("this client")

    def __del__(self) -> None:
        """Do the part of :meth:`close` that waits for no lock and no server; the exit handler does the rest."""
        has_rest = [model.abandon() for model in self.registered_models.values()]
        with contextlib.suppress(AttributeError):  # the constructor may have failed
            if not self.registered_models:
                atexit.unregister(self._at_exit)  # nothing is left to be done
            super().close()
            if not any(has_rest):
                atexit.unregister(self._at_exit)


class OptionError(InferenceServerException, CallerError, TypeError, ValueError):
    """An option of ``infer_shm`` has a value that cannot be sent."""


def _plugged(client: weakref.ref[TritonSHMClient], metadata: Metadata) -> Metadata:
    """Let a client's registered plugin, if any, complete the headers of a call."""
    living = client()
    plugin = None if living is None else living.plugin()
    if plugin is None:
        return metadata
    request = types.SimpleNamespace(headers=dict(metadata or ()))
    plugin(request)
    return [(name.lower(), value) for name, value in request.headers.items()]


def _unregister_all(models: dict[str, RegisteredModel]) -> None:
    for name in list(models):
        models.pop(name).close()


def _registered_already(model_name: str) -> ValueError:
    return ValueError(f"model {model_name!r} is registered already; unregister it first")


def _host(target: str) -> str:
    """Return the host name in a gRPC target."""
    if _UNIX_SOCKET.match(target):
        return "localhost"
    address = _SCHEME.sub("", target.rpartition("/")[2])
    try:
        return urllib.parse.urlsplit(f"//{address}").hostname or target
    except ValueError:
        return target


def _channel_options(
    keepalive: tritonclient.grpc.KeepAliveOptions | None, channel_args: Sequence[tuple[str, Any]] | None
) -> tuple[tuple[str, Any], ...]:
    """Return the channel's arguments; as with tritonclient, given arguments replace all defaults."""
    if channel_args is not None:
        return tuple(channel_args)
    keepalive = keepalive or tritonclient.grpc.KeepAliveOptions()
    return (
        *CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", keepalive.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", keepalive.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", keepalive.keepalive_permit_without_calls),
        ("grpc.http2.max_pings_without_data", keepalive.http2_max_pings_without_data),
    )


def _known_compression(algorithm: str | None) -> str | None:
    if algorithm is None or algorithm in _COMPRESSIONS:
        return algorithm
    _LOG.warning("there is no compression %r for gRPC; the request is not compressed", algorithm)
    return None
