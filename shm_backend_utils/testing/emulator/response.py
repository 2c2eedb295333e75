"""What a model answers one request with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import refuse
from .errors import TritonError, TritonModelException
from .parameters import to_json
from .tensor import Tensor, tensors_in

__all__ = ["InferenceResponse"]


class InferenceResponse:
    """What a model answers one request with: outputs, or an error, with which they are not sent.

    ``parameters`` go to the client with the response; from Triton 25.02 on.
    """

    __slots__ = ("__weakref__", "_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        tensors = tensors_in("InferenceResponse", "output_tensors", output_tensors)
        if None in tensors:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        if error is not None and not isinstance(error, TritonError):
            refuse("InferenceResponse", "error", error, "a TritonError")
        self._tensors = tensors
        self._error = error
        self._parameters = to_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs, in a list of the caller's own."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Return whether this is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON; from Triton 25.02 on."""
        return self._parameters

    def _keep_outputs(self, names: set[str]) -> None:
        """Drop the outputs that nobody asked for, as sending does to the response itself."""
        self._tensors = [tensor for tensor in self._tensors if tensor.name() in names]

    def _save(self) -> None:
        """Copy the outputs into the pool, unless it is an error."""
        if self._error is None:
            for tensor in self._tensors:
                tensor._save()
