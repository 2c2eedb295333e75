"""For users of ``triton-shm-client``: the same class, on this library's memory.

``docs/migrating.md`` lists the differences.
"""

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
from ..client.transports.grpc.address import CHANNEL_OPTIONS, GrpcAddress, tls_credentials
from ..client.transports.grpc.codec import Metadata
from ..client.transports.grpc.transport import GrpcTransport
from ..errors import CallerError, ClosedError
from ..process import call_after_fork, never_destroy
from .registered_model import InferShmError, RegisteredModel, TensorDeclaration

__all__ = ["InferShmError", "OptionError", "TritonSHMClient"]

_LOG: Final = logging.getLogger(__name__)
_COMPRESSIONS: Final = ("gzip", "deflate")
_UNIX_SOCKET: Final = re.compile(r"^unix(-abstract)?:")
_SCHEME: Final = re.compile(r"^(dns|ipv4|ipv6):")


class TritonSHMClient(tritonclient.grpc.InferenceServerClient):
    """tritonclient's gRPC client, and inference over memory that is shared with the server.

    Its constructor takes the arguments of tritonclient's. It works with every model on the server: those that have a
    ``ShmSession`` read and write the memory themselves, for others the server copies.

    Attributes
    ----------
    registered_models : dict of str to RegisteredModel
        By name.
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
        super().__init__(
            url=url,
            verbose=verbose,
            ssl=ssl,
            root_certificates=root_certificates,
            private_key=private_key,
            certificate_chain=certificate_chain,
            creds=creds,
            keepalive_options=keepalive_options,
            channel_args=channel_args,
        )
        if ssl and creds is None:
            creds = tls_credentials(Tls(root_certificates, private_key, certificate_chain))
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
        """Take memory for ``pool_size`` requests of up to ``max_batch_size`` rows each.

        That is done now if the model is loaded and the server shares memory with this process, else when it is first
        called.

        Parameters
        ----------
        model_name : str
            Its name.
        inputs, outputs : sequence of (name, shape, dtype)
            The tensors; shapes are those of a row, without the batch dimension. An output may be declared with another
            shape or dtype of as many bytes, and is then read that way; or larger than it turns out to be: the rest is
            zero.
        max_batch_size : int
            Rows in one request.
        pool_size : int
            Requests at once. Further calls wait.

        Raises
        ------
        ValueError, TypeError
            The model is registered already, or cannot be declared so.
        InferenceServerException
            The server does not answer.
        MachineError
            The machine has not that much shared memory.
        ClosedError
            This client was closed.
        """
        self._check_is_open()
        if model_name in self.registered_models:
            raise _registered_already(model_name)
        transport = GrpcTransport(self._grpc_address, _Plugged(self))
        model = RegisteredModel(transport, model_name, inputs, outputs, max_batch_size, pool_size)
        if self.registered_models.setdefault(model_name, model) is not model:  # another thread was faster
            model.close()
            raise _registered_already(model_name)
        try:
            self._check_is_open()
        except ClosedError:  # meanwhile, in another thread
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
            As it was registered.
        inputs : mapping of str to numpy.ndarray or list
            Rows, the same number for each input. They are cast to the dtypes, and repeated to the shapes, that were
            registered.
        client_timeout : float, optional
            Seconds for each request; by default without a limit.
        model_version, request_id, sequence_id, sequence_start, sequence_end, priority, timeout, headers
            As of tritonclient's ``infer``; ``timeout`` is in microseconds.
        compression_algorithm, parameters
            As of tritonclient's ``infer``, too.

        Returns
        -------
        dict of str to numpy.ndarray
            The outputs that were registered, of their dtypes and with all rows: arrays of the caller's own, writable.

        Raises
        ------
        ValueError, TypeError, KeyError
            The model is not registered, or these are no inputs for it. Nothing was sent.
        OptionError
            An option has a value that cannot be sent.
        InferShmError
            A request failed.
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
            "timeout": timeout,
            "headers": headers,
            "compression": _known_compression(compression_algorithm),
            "parameters": parameters,
        }
        try:
            checked = check_options(_said(options))
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
        """Leave the connection alone, in a forked child: it is the parent's."""
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
        with contextlib.suppress(AttributeError):  # its constructor may have failed
            if not self.registered_models:
                atexit.unregister(self._at_exit)  # nothing is left to be done
            super().close()
            if not any(has_rest):
                atexit.unregister(self._at_exit)


class OptionError(InferenceServerException, CallerError, TypeError, ValueError):
    """An option of ``infer_shm`` has a value that cannot be sent."""


class _Plugged:
    """Lets the plugin that is registered at a client, if there is one, complete the headers of every call."""

    def __init__(self, client: TritonSHMClient) -> None:
        self._client = weakref.ref(client)

    def __call__(self, metadata: Metadata) -> Metadata:
        client = self._client()
        plugin = None if client is None else client.plugin()
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
    """Return the machine in a target of gRPC."""
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


def _said(options: Mapping[str, Any]) -> RequestOptions:
    """Return the options that are not as good as not given."""
    return cast(RequestOptions, {name: value for name, value in options.items() if value})
