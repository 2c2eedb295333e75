"""What stands around an emulated stub: the server that it belongs to, and where its answers go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from .metrics_registry import MetricsRegistry

if TYPE_CHECKING:
    from .request import InferenceRequest
    from .response import InferenceResponse

__all__ = ["Host", "ResponseSink"]


class Host(Protocol):
    """The server around an emulated stub.

    What it refuses, it refuses with a :class:`~.errors.TritonModelException` that has the server's own words; the
    emulator puts before them what the stub, and the backend in the server, do.
    """

    @property
    def metrics(self) -> MetricsRegistry: ...

    def is_executing(self) -> bool:
        """Return whether the model whose code runs in this thread is past ``initialize`` and not yet in ``finalize``.

        Before and after, it may not call other models.
        """

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Have a model of this server execute a request that a model made, and return its one response, copied.

        A decoupled model is refused here.
        """

    def stream(self, request: InferenceRequest) -> Iterator[tuple[InferenceResponse, bool]]:
        """Return the responses of a model, decoupled or not, to a request that a model made; each of them copied.

        Beside each is whether it is the last. One that only ends the stream has no tensors and no error.
        """

    def cancel(self, request: InferenceRequest) -> None:
        """Cancel what :meth:`stream` has begun."""

    def model_dir(self) -> str:
        """Return the folder of the version of the model whose code runs in this thread."""

    def instance_name(self) -> str:
        """Return what the server calls the instance whose code runs in this thread, for example ``"multiply_0_0"``."""

    def log(self, level: str, message: str) -> None:
        """Write to the server's log; ``level`` is ``"INFO"``, ``"WARNING"``, ``"ERROR"`` or ``"VERBOSE"``."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model; ``config`` is JSON, or nothing for that of its folder."""

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        """Unload a model, and maybe those that it alone depends on."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model can execute requests; without a version, any of its versions."""


class ResponseSink(Protocol):
    """Where goes what a response sender of a request sends."""

    def send(self, response: InferenceResponse | None, *, is_final: bool) -> None:
        """Take a response, pruned to the requested outputs; None if the stream only ends.

        What the server refuses raises a :class:`~.errors.TritonModelException` in the model.
        """
