"""Interfaces of an emulated stub to its server and to the receiver of its responses; the stub's faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from .pybind import TritonModelException

if TYPE_CHECKING:
    from .metrics import MetricsRegistry
    from .request import InferenceRequest
    from .response import InferenceResponse

__all__ = ["Faults", "Host", "ResponseSink", "Services", "asked"]

_T = TypeVar("_T")


class Services(Protocol):
    """A server. It refuses with a :class:`.TritonModelException` that has its own words; the stub prepends others."""

    @property
    def metrics(self) -> MetricsRegistry: ...

    def log(self, level: str, message: str) -> None:
        """Write to the server's log; ``level`` is ``"INFO"``, ``"WARNING"``, ``"ERROR"`` or ``"VERBOSE"``."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model; ``config`` is JSON, or nothing for that of its folder."""

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        """Unload a model, and maybe those that it alone depends on."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model can execute requests; without a version, any of its versions."""


class Host(Services, Protocol):
    """The stub and the server of the model whose code runs in this thread."""

    def is_executing(self) -> bool:
        """Return whether it is past ``initialize`` and not yet in ``finalize``, and so may call other models."""

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Let another model, which is not decoupled, execute a request, and return a copy of its one response."""

    def stream(self, request: InferenceRequest) -> Iterator[tuple[InferenceResponse, bool]]:
        """Return copies of another model's responses, each with whether it is the last, which may have no tensors."""

    def cancel(self, request: InferenceRequest) -> None:
        """Cancel a request of :meth:`stream`."""

    def model_dir(self) -> str:
        """Return the folder of its version."""

    def instance_name(self) -> str:
        """Return the name of its instance, for example ``"multiply_0_0"``."""


class ResponseSink(Protocol):
    """The receiver of a response sender's responses."""

    def send(self, response: InferenceResponse | None, *, is_final: bool) -> None:
        """Take a response, pruned to the requested outputs; None if the stream only ends."""


def asked(host: Host, failed: str, action: Callable[[], _T]) -> _T:
    """Return the host's answer to an action; TritonModelException, which begins with ``failed``, if it refuses."""
    try:
        return action()
    except TritonModelException as error:
        where = f"Failed to process the request for model '{host.instance_name()}', message"
        raise TritonModelException(f"{failed}: {where}: {error}") from None


@dataclass(frozen=True)
class Faults:
    """Faults of real stubs that an emulated one has; none by default.

    With ``is_stub_for_numpy_1``, the stub was built for NumPy 1, as in Triton 24.10 and before, and its interpreter has
    NumPy 2. Then, without an error, arrays over the backend's memory repeat the first element everywhere, and tensors
    made from arrays are sent without contents. DLPack is not affected.
    """

    is_stub_for_numpy_1: bool = False
