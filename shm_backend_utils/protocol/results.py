"""What a model writes into a slot's record: where its outputs are. Written and read as JSON. No I/O."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .. import dtypes
from ..dtypes import BYTES, DType
from ..errors import PeerError

__all__ = ["Event", "OutputPlace", "broken_results", "parse_events", "parse_results", "unused_memory"]


_UUID: Final = re.compile(r"[0-9a-f]{32}")
_HANDLE_LENGTH: Final = 64  # cudaIpcEventHandle_t


class Event(NamedTuple):
    """An event as other processes know it.

    Attributes
    ----------
    device_uuid : str
        The GPU that it is on.
    handle : bytes
        64 bytes, CUDA's ``cudaIpcEventHandle_t``.
    """

    device_uuid: str
    handle: bytes


class OutputPlace(NamedTuple):
    """Where the model has written an output.

    ``dtype`` is None if it came back through Triton, with its own shape. Strings come back as bytes: then ``dtype`` is
    there, and ``byte_size`` is None.
    """

    name: str
    dtype: DType | None
    shape: tuple[int, ...]
    region: int
    offset: int
    byte_size: int | None


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
        raise broken_results(error) from None


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
        raise broken_results(error) from None


def _place(name: str, entry: Any, byte_sizes: Sequence[int]) -> OutputPlace:
    if entry is None:
        return OutputPlace(name, None, (), 0, 0, None)
    type_name, shape, *place = entry
    dtype = dtypes.BY_NAME[type_name]
    if type(shape) is not list or not all(type(number) is int and number >= 0 for number in (*shape, *place)):
        raise ValueError("a size that is no number")
    if dtype is BYTES and not place:
        return OutputPlace(name, dtype, tuple(shape), 0, 0, None)
    nbytes, region, offset = place
    if (math.prod(shape) * dtype.itemsize != nbytes and dtype is not BYTES) or offset + nbytes > byte_sizes[region]:
        raise ValueError(f"a span of {nbytes} bytes that is not the call's")
    return OutputPlace(name, dtype, tuple(shape), region, offset, nbytes)


def unused_memory(model: str) -> PeerError:
    """Return the error for a model that has answered, but not written these results."""
    return PeerError(
        f"model {model!r} answered without having used the shared memory; its config.pbtxt declares SHM_PATHS, but "
        "does its model.py use ShmSession?"
    )


def _event(uuid: Any, handle: Any) -> Event:
    if type(uuid) is not str or not _UUID.fullmatch(uuid):
        raise ValueError("an event of a device without a UUID")
    if type(handle) is not str:
        raise ValueError("an event that is no text")
    found = base64.b64decode(handle, validate=True)
    if len(found) != _HANDLE_LENGTH:
        raise ValueError(f"an event of {len(found)} bytes")
    return Event(uuid, found)


def broken_results(found: object) -> PeerError:
    """Return the error for results that are not what protocol v1 says."""
    return PeerError(f"the model's results break the protocol: {found}; is it of the same version?")
