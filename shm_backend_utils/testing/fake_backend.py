"""As much of Triton's Python backend as a session uses, for a process that no server has started.

``sys.modules[NAME] = module()`` puts it in the backend's place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tensors import dlpack

__all__ = ["NAME", "Logger", "Request", "Response", "Sender", "Tensor", "TritonError", "module"]

NAME: Final = "triton_python_backend_utils"


class Tensor:
    """A tensor of NumPy's, or a capsule that nobody takes over."""

    def __init__(self, name: str, content: Any) -> None:
        self._name = name
        self.content = content

    @classmethod
    def from_dlpack(cls, name: str, capsule: object) -> Tensor:
        """Take over a capsule, if it is of host memory."""
        try:
            return cls(name, dlpack.consume(capsule))
        except TypeError:
            return cls(name, capsule)

    def name(self) -> str:
        return self._name

    def is_cpu(self) -> bool:
        return isinstance(self.content, np.ndarray)

    def shape(self) -> list[int]:
        return list(self.content.shape)

    def to_dlpack(self) -> object:
        return dlpack.export(dlpack.writable_alias(self.content))

    def as_numpy(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.content
        return array


class TritonError(Exception):
    """An error with the names of Triton's codes."""

    INVALID_ARG: Final = "INVALID_ARG"
    NOT_FOUND: Final = "NOT_FOUND"
    UNAVAILABLE: Final = "UNAVAILABLE"
    CANCELLED: Final = "CANCELLED"
    ALREADY_EXISTS: Final = "ALREADY_EXISTS"
    INTERNAL: Final = "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Response:
    """What execute returns for one request."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.content for tensor in output_tensors}
        self.error = error


class Sender:
    """Keeps what a decoupled model sends; None for the end without a response."""

    def __init__(self) -> None:
        self.sent: list[Response | None] = []
        self.is_over = False

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        assert not self.is_over
        self.is_over = flags != 0
        self.sent.append(response)


class Request:
    """A request.

    Parameters
    ----------
    parameters : mapping or str
        The text is what Triton makes of it.
    outputs : iterable of str
        Those that the client wants.
    inputs : mapping of str to array
        What came with the request.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any] | str = "",
        outputs: Iterable[str] = (),
        inputs: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(parameters)
        self._outputs = list(outputs)
        self._inputs = [Tensor(name, array) for name, array in (inputs or {}).items()]
        self.sender = Sender()
        self.is_given_up = False

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def is_cancelled(self) -> bool:
        return self.is_given_up

    def request_id(self) -> str:
        return "7"

    def correlation_id(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Sender:
        return self.sender


class Logger:
    """The server's log, which is standard error.

    Attributes
    ----------
    lines : list of str
        What was written since the last module was made.
    """

    lines: Final[list[str]] = []

    @classmethod
    def log_error(cls, message: str) -> None:
        line = message.encode().decode()  # as the backend, which takes UTF-8 alone
        cls.lines.append(line)
        print(line, file=sys.stderr, flush=True)

    log_warn = log_error


def module() -> ModuleType:
    """Return what a model imports as ``triton_python_backend_utils``, with an empty log."""
    made = ModuleType(NAME)
    vars(made).update(
        Tensor=Tensor,
        InferenceResponse=Response,
        TritonError=TritonError,
        Logger=Logger,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    Logger.lines.clear()
    return made
