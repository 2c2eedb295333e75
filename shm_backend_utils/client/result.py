"""What a call gives back: outputs as views of the slot that the model wrote them to."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import ClosedError, PeerError
from ..region.cuda_events import Event
from ..region.cuda_runtime import HANDLE_LENGTH
from .space import Space

__all__ = ["OutputPlace", "Result", "parse_events", "parse_results", "result_of"]


_UUID: Final = re.compile(r"[0-9a-f]{32}")


class Result(Mapping[str, npt.NDArray[Any]]):
    """A mapping from output names to arrays, and a context manager.

    On the direct path, and on Triton's shared memory, the arrays are views of shared memory: nothing is copied. The
    memory serves another call when the result *and* every array taken from it are gone; :meth:`release`, or leaving the
    ``with`` block, gives up the result's own share.

    Attributes
    ----------
    path : str
        ``"direct"``, ``"triton-shm"`` or ``"inline"``: the way that this request went.
    response : tritonclient InferResult
        The server's reply, as ``tritonclient`` returns it; of a split call, that of its first part.
    overflowed : mapping of str to int
        Outputs that found too little room in the slot and came back through Triton, with their sizes in bytes.
    bytes_avoided : int
        Bytes of tensors that neither the request nor its response carried.
    """

    def __init__(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        path: str,
        response: Any,
        overflowed: Mapping[str, int] | None = None,
        bytes_avoided: int = 0,
    ) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] | None = arrays
        self.path = path
        self.response = response
        self.overflowed = overflowed or {}
        self.bytes_avoided = bytes_avoided

    def release(self) -> None:
        """Give up the arrays. Those that were taken out stay valid. Twice is fine."""
        self._arrays = None

    def copy(self) -> dict[str, npt.NDArray[Any]]:
        """Return all outputs as arrays of their own, which hold no shared memory."""
        return {name: array.copy() for name, array in self._held().items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._held()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __enter__(self) -> Result:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._arrays is None:
            return "<Result released>"
        return f"<Result path={self.path} { ({name: array.shape for name, array in self._arrays.items()}) }>"

    def _held(self) -> dict[str, npt.NDArray[Any]]:
        if self._arrays is None:
            raise ClosedError("this result")
        return self._arrays


class OutputPlace(NamedTuple):
    """Where the model has written an output; ``dtype`` is None if it came back through Triton."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    region: int
    offset: int


def parse_results(text: bytes, byte_sizes: Sequence[int]) -> tuple[OutputPlace, ...]:
    """Read what the model wrote into a slot's record.

    Parameters
    ----------
    text : bytes
        The record's results, copied out of shared memory. A peer wrote them: they are checked here.
    byte_sizes : sequence of int
        Of the call's regions.

    Raises
    ------
    PeerError
        The results are not what protocol v1 says.
    """
    try:
        return tuple([_place(name, entry, byte_sizes) for name, entry in json.loads(text).items() if name])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _broken(error) from None


def parse_events(text: bytes) -> tuple[Event, ...]:
    """Read from the same text which events tell that the outputs are complete; raises as :func:`parse_results`."""
    if b'""' not in text:
        return ()
    try:
        entries = json.loads(text).get("", [])
        if type(entries) is not list:
            raise TypeError("events that are no array")
        return tuple([_event(*entry) for entry in entries])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(error) from None


def result_of(
    places: tuple[OutputPlace, ...],
    spaces: Sequence[Space],
    memory: npt.NDArray[np.uint8],
    response: Any,
    input_size: int = 0,
) -> Result:
    """Return the outputs that are in these places of a region, or in the response.

    Parameters
    ----------
    places : tuple of OutputPlace
        Where the model wrote them.
    spaces : sequence of Space
        The call's regions.
    memory : numpy.ndarray of uint8
        The slot's whole region on the host.
    response : InferResult
        Holds those that came back through Triton.
    input_size : int
        Bytes of inputs that the request did not carry.

    Raises
    ------
    PeerError
        The response does not have an output that came back through Triton.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    overflowed: dict[str, int] = {}
    avoided = input_size
    for name, dtype, shape, region, offset in places:
        if dtype is not None:
            try:
                array = arrays[name] = spaces[region].array_at(memory, offset, dtype, shape)
            except ValueError as error:  # more dimensions, or larger ones, than NumPy has
                raise _broken(error) from None
            avoided += array.nbytes
            continue
        array = response.as_numpy(name)
        if array is None:
            raise _broken(name)
        arrays[name] = array
        overflowed[name] = array.nbytes
    return Result(arrays, "direct", response, overflowed, avoided)


def _place(name: str, entry: Any, byte_sizes: Sequence[int]) -> OutputPlace:
    if entry is None:
        return OutputPlace(name, None, (), 0, 0)
    type_name, shape, nbytes, region, offset = entry
    dtype = dtypes.BY_NAME[type_name]
    numbers = (*shape, nbytes, region, offset)
    if type(shape) is not list or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size that is no number")
    if math.prod(shape) * dtype.itemsize != nbytes or offset + nbytes > byte_sizes[region]:
        raise ValueError(f"a span of {nbytes} bytes that is not the call's")
    return OutputPlace(name, dtype.numpy, tuple(shape), region, offset)


def _event(uuid: Any, handle: Any) -> Event:
    if type(uuid) is not str or not _UUID.fullmatch(uuid):
        raise ValueError("an event of a device without a UUID")
    if type(handle) is not str:
        raise ValueError("an event that is no text")
    found = base64.b64decode(handle, validate=True)
    if len(found) != HANDLE_LENGTH:
        raise ValueError(f"an event of {len(found)} bytes")
    return Event(uuid, found)


def _broken(found: object) -> PeerError:
    return PeerError(f"the model's results break the protocol: {found}; is it of the same version?")
