"""What both clients offer beside inference, by tritonclient's names: the server's health, its models, loading them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from . import server_calls
from .of_this_process import OfThisProcess
from .steps import Steps
from .transports.messages import Codec

__all__ = ["AsyncServerMethods", "ServerMethods"]

P = ParamSpec("P")
T = TypeVar("T")
ServerCall = Callable[Concatenate[Codec, float, P], Steps[T]]

_NO_FILES: Final[Mapping[str, bytes]] = {}


class ServerMethods(OfThisProcess, ABC):
    """Of a client for threads.

    All take ``timeout_s``, how long the server may take, in seconds; by default what the client says. What the server
    refuses is an InferenceError; where it does not answer, a DeadlineExceededError or ServerUnavailableError. Answers
    are in JSON's types, and of the same shape over gRPC and HTTP.
    """

    @abstractmethod
    def _ask(self, timeout_s: float | None, call: ServerCall[P, T], *named: P.args, **more: P.kwargs) -> T:
        """Make one call of :mod:`.server_calls`."""

    def is_server_live(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is up. Where nobody answers, it raises."""
        return self._ask(timeout_s, server_calls.is_so, "server live")

    def is_server_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is up and has loaded its models."""
        return self._ask(timeout_s, server_calls.is_so, "server ready")

    def is_model_ready(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> bool:
        """Return whether a model is loaded and its processes live; of an ensemble, whether its steps are ready.

        Triton before 26.01 calls a model ready whose process has died. So the processes of a Python model are looked
        at, where this one sees them; and a session is asked for a sign of life, which ``model.py`` does not see. A
        model whose ``call.forward`` finds no memory is not ready, either.

        Raises
        ------
        DeadlineExceededError
            The model was busy for longer than ``timeout_s``: what it is asked waits its turn.
        LivenessUnknownError
            A Python model gives no sign of life, on a server before 26.01 whose processes are not seen from here.
        """
        return self._ask(timeout_s, server_calls.is_model_ready, model, model_version)

    def get_server_metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the server's name, version and extensions."""
        return self._ask(timeout_s, server_calls.ask, "server metadata")

    def get_model_metadata(
        self, model: str, model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return a model's versions, inputs and outputs."""
        return self._ask(timeout_s, server_calls.ask, "model metadata", model, model_version)

    def get_model_config(
        self, model: str, model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return a model's configuration, as the server has completed it."""
        return self._ask(timeout_s, server_calls.ask, "model config", model, model_version)

    def get_inference_statistics(
        self, model: str = "", model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the server's figures of a model, or of all: ``{"model_stats": [...]}``."""
        return self._ask(timeout_s, server_calls.ask, "model statistics", model, model_version)

    def load_model(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
        timeout_s: float | None = None,
    ) -> None:
        """Have a model loaded, or loaded anew, by a server with ``--model-control-mode=explicit``.

        Parameters
        ----------
        model : str
            Its name.
        config : str, optional
            Its configuration as JSON, instead of that in the repository.
        files : mapping of str to bytes, optional
            Its files, instead of those in the repository: ``{"file:1/model.py": b"..."}``. Needs ``config``.
        timeout_s : float, optional
            How long it may take, in seconds; by default what the client says.
        """
        self._ask(timeout_s, server_calls.load, model, config, files)

    def unload_model(self, model: str, *, unload_dependents: bool = False, timeout_s: float | None = None) -> None:
        """Have a model unloaded; of an ensemble also its steps, if ``unload_dependents``. Requests are ended first."""
        self._ask(timeout_s, server_calls.unload, model, unload_dependents)


class AsyncServerMethods(OfThisProcess, ABC):
    """Of a client for tasks: as :class:`ServerMethods`, to be awaited."""

    @abstractmethod
    def _ask(
        self, timeout_s: float | None, call: ServerCall[P, T], *named: P.args, **more: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Make one call of :mod:`.server_calls`."""

    async def is_server_live(self, *, timeout_s: float | None = None) -> bool:
        """As :meth:`ShmClient.is_server_live`."""
        return await self._ask(timeout_s, server_calls.is_so, "server live")

    async def is_server_ready(self, *, timeout_s: float | None = None) -> bool:
        """As :meth:`ShmClient.is_server_ready`."""
        return await self._ask(timeout_s, server_calls.is_so, "server ready")

    async def is_model_ready(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> bool:
        """As :meth:`ShmClient.is_model_ready`."""
        return await self._ask(timeout_s, server_calls.is_model_ready, model, model_version)

    async def get_server_metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """As :meth:`ShmClient.get_server_metadata`."""
        return await self._ask(timeout_s, server_calls.ask, "server metadata")

    async def get_model_metadata(
        self, model: str, model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """As :meth:`ShmClient.get_model_metadata`."""
        return await self._ask(timeout_s, server_calls.ask, "model metadata", model, model_version)

    async def get_model_config(
        self, model: str, model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """As :meth:`ShmClient.get_model_config`."""
        return await self._ask(timeout_s, server_calls.ask, "model config", model, model_version)

    async def get_inference_statistics(
        self, model: str = "", model_version: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """As :meth:`ShmClient.get_inference_statistics`."""
        return await self._ask(timeout_s, server_calls.ask, "model statistics", model, model_version)

    async def load_model(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
        timeout_s: float | None = None,
    ) -> None:
        """As :meth:`ShmClient.load_model`."""
        await self._ask(timeout_s, server_calls.load, model, config, files)

    async def unload_model(
        self, model: str, *, unload_dependents: bool = False, timeout_s: float | None = None
    ) -> None:
        """As :meth:`ShmClient.unload_model`."""
        await self._ask(timeout_s, server_calls.unload, model, unload_dependents)
