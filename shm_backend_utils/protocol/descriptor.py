"""Protocol v1: the request parameters ``shm_io`` and ``shm_generation``. No I/O. ``docs/protocol.md`` explains it.

``shm_io`` is the descriptor: where a call's tensors lie. It is the same text for every request of the same call, so
that whoever reads it needs to check it once. What changes from request to request is ``shm_generation`` alone.

A descriptor comes from a peer: it is a claim. :func:`parse` checks all that can be checked without opening anything,
so that what it returns needs no second look: every span lies inside its region as claimed, no output overlaps anything,
and an input's size is that of its shape. What remains is for the one who opens the regions: that they are as claimed.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .. import dtypes
from ..dtypes import DType
from ..errors import DescriptorError
from .claims import (
    CudaRegionClaim,
    LentRegionClaim,
    NamedRegionClaim,
    RegionClaim,
    SystemRegionClaim,
    claimed_size,
    encode_region,
    parse_regions,
)
from .json_checks import MAX_INT64, brief, check_fields, integer, kind_of, shown_number
from .ring import Ring, encode_ring, parse_ring

__all__ = [
    "GENERATION_PARAMETER",
    "MAX_DESCRIPTOR_LENGTH",
    "PARAMETER",
    "VERSION",
    "CudaRegionClaim",
    "Descriptor",
    "InputSpan",
    "LentRegionClaim",
    "NamedRegionClaim",
    "OutputSpan",
    "RegionClaim",
    "SystemRegionClaim",
    "check_generation",
    "check_outputs_are_disjoint",
    "encode",
    "parse",
]

PARAMETER: Final = "shm_io"
GENERATION_PARAMETER: Final = "shm_generation"
VERSION: Final = 1
MAX_DESCRIPTOR_LENGTH: Final = 16 * 1024

_MAX_RANK: Final = 64


@dataclass(frozen=True, slots=True)
class InputSpan:
    """An input tensor's bytes: C-contiguous, at ``offset`` from the beginning of ``regions[region]``.

    Strings may end before ``byte_size``: their number is that of the shape.
    """

    region: int
    offset: int
    byte_size: int
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputSpan:
    """Room for an output tensor: up to ``byte_size`` bytes at ``offset`` from the beginning of ``regions[region]``."""

    region: int
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What one request says about its memory. ``model`` is the only model that it speaks to.

    With a ``ring``, the outputs are those of its first frame.
    """

    model: str
    regions: tuple[RegionClaim, ...]
    inputs: Mapping[str, InputSpan]
    outputs: Mapping[str, OutputSpan]
    ring: Ring | None = None


def encode(descriptor: Descriptor) -> str:
    """Return the descriptor as the value of the request parameter.

    Raises
    ------
    DescriptorError
        It would be longer than :data:`MAX_DESCRIPTOR_LENGTH` characters.
    """
    value = {
        "v": VERSION,
        "model": descriptor.model,
        "regions": [encode_region(region) for region in descriptor.regions],
        "inputs": {
            name: [span.region, span.offset, span.byte_size, span.dtype.name, span.shape]
            for name, span in descriptor.inputs.items()
        },
        "outputs": {name: [span.region, span.offset, span.byte_size] for name, span in descriptor.outputs.items()},
    }
    if descriptor.ring is not None:
        value["ring"] = encode_ring(descriptor.ring)
    text = json.dumps(value, separators=(",", ":"))
    _check_length(text)
    return text


def parse(text: str) -> Descriptor:
    """Check the value of the request parameter and return it as a descriptor.

    Raises
    ------
    DescriptorError
        It is not a descriptor of version 1. The message names the field, and never a key or a token.
    """
    _check_length(text)
    return from_json(_decoded(text))


def from_json(value: object) -> Descriptor:
    """Check a decoded JSON value and return it as a descriptor; raises what :func:`parse` raises."""
    if type(value) is not dict:
        raise DescriptorError("", kind_of(value), "a JSON object")
    version = value.get("v")
    if type(version) is not int or version != VERSION:
        raise DescriptorError("v", shown_number(version), f"{VERSION}, the version that this model speaks")
    check_fields("", value, _TOP_FIELDS | {"ring"} if "ring" in value else _TOP_FIELDS)
    model = value["model"]
    if type(model) is not str or not model:
        raise DescriptorError("model", kind_of(model), "the name of a model")
    claims = parse_regions(value["regions"])
    inputs = {name: _input(name, entry, claims) for name, entry in _entries("inputs", value["inputs"])}
    outputs = {name: _output(name, entry, claims) for name, entry in _entries("outputs", value["outputs"])}
    ring = parse_ring(value["ring"]) if "ring" in value else None
    found = Descriptor(model, claims, inputs, outputs, ring)
    if ring is not None:
        _check_ring_is_inside(found, ring)
    check_outputs_are_disjoint(found, lambda region: (region, 0))
    return found


def check_generation(value: object) -> int:
    """Return the value of ``shm_generation`` if it is one, else raise :class:`DescriptorError`."""
    if type(value) is int and 1 <= value <= MAX_INT64:
        return value
    raise DescriptorError("", shown_number(value), "a 64-bit integer of 1 or more", GENERATION_PARAMETER)


_TOP_FIELDS: Final = frozenset({"v", "model", "regions", "inputs", "outputs"})


def _decoded(text: str) -> object:
    """Return the value that the text is, in JSON or in hexadecimal digits of JSON; no object's text is both."""
    try:
        try:
            return json.loads(text)
        except ValueError:
            return json.loads(binascii.unhexlify(text).decode())
    except (ValueError, RecursionError):
        raise DescriptorError("", "text that is not JSON", "a JSON object, as it is or in hexadecimal") from None


def _check_length(text: str) -> None:
    if len(text) > MAX_DESCRIPTOR_LENGTH:
        raise DescriptorError("", f"{len(text)} characters", f"at most {MAX_DESCRIPTOR_LENGTH}")


def _entries(field: str, value: object) -> list[tuple[str, Any]]:
    if type(value) is not dict:
        raise DescriptorError(field, kind_of(value), "an object of tensor names")
    if "" in value:
        raise DescriptorError(field, "a tensor without a name", "names of the model's tensors")
    return list(value.items())


def _input(name: str, entry: object, regions: tuple[RegionClaim, ...]) -> InputSpan:
    if type(entry) is not list or len(entry) != 5:
        raise DescriptorError(
            f"inputs.{brief(name)}", kind_of(entry), "[region index, offset, byte size, data type, shape]"
        )
    region, offset, byte_size = _span("inputs", name, entry, regions)
    type_name, shape = entry[3], entry[4]
    dtype = dtypes.BY_NAME.get(type_name) if type(type_name) is str else None
    if dtype is None:
        found = repr(brief(type_name)) if type(type_name) is str else kind_of(type_name)
        raise DescriptorError(f"inputs.{brief(name)}[3]", found, f"one of {', '.join(dtypes.BY_NAME)}")
    if type(shape) is not list or len(shape) > _MAX_RANK:
        raise DescriptorError(f"inputs.{brief(name)}[4]", kind_of(shape), "an array of dimensions")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_INT64:
            raise DescriptorError(f"inputs.{brief(name)}[4]", shown_number(size), "dimensions of 0 or more")
    count = math.prod(shape)
    if dtype is dtypes.BYTES:
        if count * dtypes.LENGTH_SIZE > byte_size:
            least = shown_number(count * dtypes.LENGTH_SIZE)
            raise DescriptorError(
                f"inputs.{brief(name)}[2]", f"{byte_size}", f"at least {least}, which the strings' lengths take"
            )
    elif count * dtype.itemsize != byte_size:
        nbytes = shown_number(count * dtype.itemsize)
        raise DescriptorError(f"inputs.{brief(name)}[2]", f"{byte_size}", f"{nbytes}, the size of the shape")
    return InputSpan(region, offset, byte_size, dtype, tuple(shape))


def _output(name: str, entry: object, regions: tuple[RegionClaim, ...]) -> OutputSpan:
    if type(entry) is not list or len(entry) != 3:
        raise DescriptorError(f"outputs.{brief(name)}", kind_of(entry), "[region index, offset, byte size]")
    return OutputSpan(*_span("outputs", name, entry, regions))


def _span(group: str, name: str, entry: list[Any], regions: tuple[RegionClaim, ...]) -> tuple[int, int, int]:
    region, offset, byte_size = entry[0], entry[1], entry[2]
    if (
        type(region) is int
        and type(offset) is int
        and type(byte_size) is int
        and 0 <= region < len(regions)
        and offset >= 0
        and byte_size >= 0
        and offset + byte_size <= claimed_size(regions[region])
    ):
        return region, offset, byte_size
    field = f"{group}.{brief(name)}"
    if not regions:
        raise DescriptorError(f"{field}[0]", shown_number(region), "no tensor at all, as there are no regions")
    integer(field, "[0]", region, 0, len(regions) - 1)
    integer(field, "[1]", offset, 0)
    integer(field, "[2]", byte_size, 0)
    limit = claimed_size(regions[region])
    raise DescriptorError(field, f"an end at byte {offset + byte_size}", f"at most {limit}, its region's size")


def check_outputs_are_disjoint(descriptor: Descriptor, place: Callable[[int], tuple[Any, int]]) -> None:
    """Raise :class:`DescriptorError` if an output overlaps anything; with a ring, that of any frame.

    Parameters
    ----------
    descriptor : Descriptor
        Its spans.
    place : callable
        Takes a region index; returns what memory the region is in (sortable), and where in it the region begins.
    """
    ring, outputs = descriptor.ring, descriptor.outputs
    frames = [outputs] if ring is None else [ring.outputs(outputs, index) for index in range(ring.frames)]
    spans = [(*_interval(span, place), name) for frame in frames for name, span in frame.items()]
    spans += [(*_interval(span, place), "") for span in descriptor.inputs.values()]
    reach_memory, reach, reach_output = None, 0, ""
    for memory, begin, end, output in sorted(span for span in spans if span[1] < span[2]):
        if memory == reach_memory and begin < reach and (output or reach_output):
            raise DescriptorError(
                f"outputs.{brief(output or reach_output)}",
                "bytes of another tensor in its span",
                "bytes of its own",
            )
        if memory != reach_memory or end > reach:
            reach_memory, reach, reach_output = memory, end, output


def _check_ring_is_inside(descriptor: Descriptor, ring: Ring) -> None:
    if not any(isinstance(region, SystemRegionClaim) for region in descriptor.regions):
        raise DescriptorError("ring", "a ring without a managed region", "one whose slot records it uses")
    for name, span in ring.outputs(descriptor.outputs, ring.frames - 1).items():
        end, limit = span.offset + span.byte_size, claimed_size(descriptor.regions[span.region])
        if end > limit:
            raise DescriptorError(
                "ring.stride", f"an end of output {brief(name)!r} at byte {end}", f"at most {limit}, its region's size"
            )


def _interval(span: InputSpan | OutputSpan, place: Callable[[int], tuple[Any, int]]) -> tuple[Any, int, int]:
    memory, base = place(span.region)
    return memory, base + span.offset, base + span.offset + span.byte_size
