"""What a request says, and what a response does, inside the emulated server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from ...dtypes import BYTES, from_numpy
from ...model_spec import output_names
from ...tensors.strings import Strings
from ...tensors.values import untyped_array
from ..emulator import TensorContent

__all__ = ["Delivery", "Input", "Outcome", "Request", "ServerError", "request_of_arrays"]


class ServerError(Exception):
    """What the emulated server refuses or fails a request with: its words, and Triton's code, as ``"INVALID_ARG"``."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Input(NamedTuple):
    """An input as a request has it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Any  # bytes as they travel, unless the caller had an array


@dataclass(slots=True)
class Request:
    """One request.

    Attributes
    ----------
    inputs : mapping of str to array
        Or, out of a message, of Input.
    outputs : sequence of str, optional
        Those that are wanted; all, if not given.
    parameters : mapping, optional
        Of str to str, int, bool or float.
    request_id : str
    sequence_id : int or str
        0 for none.
    flags : int
        1 for the first of its sequence, 2 for the last.
    timeout_us, priority : int
    model, version : str
        Empty for the harness' first model, and for the version that it serves.
    """

    inputs: Mapping[str, Any]
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)
    request_id: str = ""
    sequence_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    model: str = ""
    version: str = ""


class Delivery(NamedTuple):
    """A checked request, as an instance of its model gets it; it can be pickled."""

    request_id: str
    correlation_id: int | str
    inputs: list[tuple[str, str, npt.NDArray[Any]]]
    requested_output_names: tuple[str, ...]
    parameters: dict[str, Any]
    flags: int
    timeout_us: int


class Outcome(NamedTuple):
    """One response."""

    outputs: list[TensorContent]
    error: tuple[str, str] | None  # message and code
    is_final: bool  # no more come
    is_empty: bool = False  # it only ends the stream
    parameters: str = ""  # as JSON; empty for none


def request_of_arrays(
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None,
    parameters: Mapping[str, Any] | None,
    **more: Any,
) -> Request:
    """Return a request of arrays, or of what NumPy makes arrays of."""
    names = None if outputs is None else output_names(outputs)
    return Request({name: _input(name, value) for name, value in inputs.items()}, names, parameters or {}, **more)


def _input(name: str, value: Any) -> Input:
    array = untyped_array(name, value)
    dtype = from_numpy(array.dtype, name)
    if dtype is BYTES:
        array = Strings.of(name, array).numpy()
    return Input(name, dtype.name, array.shape, array)
