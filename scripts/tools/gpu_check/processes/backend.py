"""As little of Triton's Python backend as ShmSession needs, for a process that no server has started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.tensors import dlpack

__all__ = ["Request", "put_in_place"]


class Request:
    """A request without tensors: its parameters say where they are."""

    def __init__(self, parameters: str, outputs: Sequence[str]) -> None:
        self._parameters = parameters
        self._outputs = outputs

    def parameters(self) -> str:
        """Return the JSON text."""
        return self._parameters

    def requested_output_names(self) -> Sequence[str]:
        """Return the names of all outputs."""
        return self._outputs

    def inputs(self) -> list[Any]:
        """Return nothing."""
        return []


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

    def as_numpy(self) -> npt.NDArray[np.generic]:
        """Return what was taken over."""
        array: npt.NDArray[np.generic] = self.content
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


class InferenceResponse:
    """What execute returns for one request."""

    def __init__(self, tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self.tensors = tensors
        self.error = error


class Logger:
    """The server's log."""

    @staticmethod
    def log_error(message: str) -> None:
        """Write to standard error."""
        print(message, file=sys.stderr, flush=True)

    log_warn = log_error


def put_in_place() -> None:
    """Let this process import it under the backend's name."""
    module = ModuleType("triton_python_backend_utils")
    vars(module).update(Tensor=Tensor, InferenceResponse=InferenceResponse, TritonError=TritonError, Logger=Logger)
    sys.modules[module.__name__] = module
