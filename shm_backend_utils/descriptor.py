"""Protocol v1: the request parameters ``shm_io`` and ``shm_generation``. No I/O. ``docs/protocol.md`` explains it.

``shm_io`` is the descriptor: where a call's tensors lie. It is the same text for every request of the same call, so
that whoever reads it needs to check it once. What changes from request to request is ``shm_generation`` alone.

A descriptor comes from a peer: it is a claim. :func:`parse` checks all that can be checked without opening anything,
so that what it returns needs no second look: every span lies inside its region as claimed, no output overlaps anything,
and an input's size is that of its shape. What remains is for the one who opens the regions: that they are as claimed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from . import dtypes
from .dtypes import DType
from .errors import DescriptorError

__all__ = [
    "GENERATION_PARAMETER",
    "MAX_DESCRIPTOR_LENGTH",
    "PARAMETER",
    "VERSION",
    "Descriptor",
    "InputSpan",
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

_MAX_INT64: Final = 2**63 - 1
_MAX_RANK: Final = 64
_TOKEN: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SystemRegionClaim:
    """A managed region in POSIX shared memory, and the slot of it that serves this request.

    Attributes
    ----------
    key : str
        Name of the shared-memory object, without a leading slash.
    byte_size : int
        Size of the whole region, its header included.
    token : str
        32 lowercase hexadecimal digits: the secret in the region's header. Who knows it could open the region.
    slot : int
        Index into the region's slot table.
    """

    key: str
    byte_size: int
    token: str
    slot: int


@dataclass(frozen=True, slots=True)
class NamedRegionClaim:
    """A foreign region: one without a header, by the name under which it is registered at the server.

    Offsets of spans count from the beginning of what is registered. Nothing fences it: it has no slots.
    """

    name: str


RegionClaim = SystemRegionClaim | NamedRegionClaim


@dataclass(frozen=True, slots=True)
class InputSpan:
    """An input tensor's bytes: C-contiguous, at ``offset`` from the beginning of ``regions[region]``."""

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
    """What one request says about its memory. ``model`` is the only model that it speaks to."""

    model: str
    regions: tuple[RegionClaim, ...]
    inputs: Mapping[str, InputSpan]
    outputs: Mapping[str, OutputSpan]


def encode(descriptor: Descriptor) -> str:
    """Return the descriptor as the value of the request parameter.

    Raises
    ------
    DescriptorError
        It would be longer than :data:`MAX_DESCRIPTOR_LENGTH` characters.
    """
    text = json.dumps(
        {
            "v": VERSION,
            "model": descriptor.model,
            "regions": [_encoded(region) for region in descriptor.regions],
            "inputs": {
                name: [span.region, span.offset, span.byte_size, span.dtype.name, span.shape]
                for name, span in descriptor.inputs.items()
            },
            "outputs": {name: [span.region, span.offset, span.byte_size] for name, span in descriptor.outputs.items()},
        },
        separators=(",", ":"),
    )
    _check_length(text)
    return text


def _encoded(region: RegionClaim) -> dict[str, object]:
    if isinstance(region, NamedRegionClaim):
        return {"kind": "named", "name": region.name}
    return {
        "kind": "system",
        "key": region.key,
        "byte_size": region.byte_size,
        "token": region.token,
        "slot": region.slot,
    }


def parse(text: str) -> Descriptor:
    """Check the value of the request parameter and return it as a descriptor.

    Raises
    ------
    DescriptorError
        It is not a descriptor of version 1. The message names the field, and never a key or a token.
    """
    _check_length(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DescriptorError("", "text that is not JSON", "a JSON object") from None
    return from_json(value)


def from_json(value: object) -> Descriptor:
    """Check a decoded JSON value and return it as a descriptor; raises what :func:`parse` raises."""
    if type(value) is not dict:
        raise DescriptorError("", _kind(value), "a JSON object")
    version = value.get("v")
    if type(version) is not int or version != VERSION:
        raise DescriptorError("v", _number(version), f"{VERSION}, the version that this model speaks")
    _check_fields("", value, _TOP_FIELDS)
    model = value["model"]
    if type(model) is not str or not model:
        raise DescriptorError("model", _kind(model), "the name of a model")
    regions = value["regions"]
    if type(regions) is not list:
        raise DescriptorError("regions", _kind(regions), "an array of regions")
    claims = tuple([_region(f"regions[{index}]", region) for index, region in enumerate(regions)])
    _check_regions_are_different(claims)
    inputs = {name: _input(name, entry, claims) for name, entry in _entries("inputs", value["inputs"])}
    outputs = {name: _output(name, entry, claims) for name, entry in _entries("outputs", value["outputs"])}
    check_outputs_are_disjoint(inputs, outputs, lambda region: (region, 0))
    return Descriptor(model, claims, inputs, outputs)


def check_generation(value: object) -> int:
    """Return the value of ``shm_generation`` if it is one, else raise :class:`DescriptorError`."""
    if type(value) is int and 1 <= value <= _MAX_INT64:
        return value
    raise DescriptorError("", _number(value), "a 64-bit integer of 1 or more", GENERATION_PARAMETER)


_TOP_FIELDS: Final = frozenset({"v", "model", "regions", "inputs", "outputs"})
_NAMED_FIELDS: Final = frozenset({"kind", "name"})
_SYSTEM_FIELDS: Final = frozenset({"kind", "key", "byte_size", "token", "slot"})


def _check_length(text: str) -> None:
    if len(text) > MAX_DESCRIPTOR_LENGTH:
        raise DescriptorError("", f"{len(text)} characters", f"at most {MAX_DESCRIPTOR_LENGTH}")


def _check_fields(field: str, value: dict[str, Any], expected: frozenset[str]) -> None:
    if value.keys() != expected:
        inside = f"{field}." if field else ""
        for name in sorted(expected - value.keys()):
            raise DescriptorError(f"{inside}{name}", "nothing", "this field")
        for name in sorted(value.keys() - expected):
            raise DescriptorError(f"{inside}{_short(name)}", "an unknown field", f"only {', '.join(sorted(expected))}")


def _region(field: str, value: object) -> RegionClaim:
    if type(value) is not dict:
        raise DescriptorError(field, _kind(value), "a region object")
    kind = value.get("kind")
    if kind == "system":
        return _system_region(field, value)
    if kind == "named":
        return _named_region(field, value)
    found = f"{_short(kind)!r}" if type(kind) is str else _kind(kind)
    raise DescriptorError(f"{field}.kind", found, "'system' or 'named'")


def _named_region(field: str, value: dict[str, Any]) -> NamedRegionClaim:
    _check_fields(field, value, _NAMED_FIELDS)
    name = value["name"]
    if type(name) is not str or not name:
        raise DescriptorError(f"{field}.name", _kind(name), "the name of a registered region")
    return NamedRegionClaim(name)


def _system_region(field: str, value: dict[str, Any]) -> SystemRegionClaim:
    _check_fields(field, value, _SYSTEM_FIELDS)
    key, token = value["key"], value["token"]
    if type(key) is not str:
        raise DescriptorError(f"{field}.key", _kind(key), "a string")
    if type(token) is not str or not _TOKEN.fullmatch(token):
        raise DescriptorError(f"{field}.token", _kind(token), "32 lowercase hexadecimal digits")
    return SystemRegionClaim(
        key,
        _integer(field, "byte_size", value["byte_size"], 1),
        token,
        _integer(field, "slot", value["slot"], 0),
    )


def _entries(field: str, value: object) -> list[tuple[str, Any]]:
    if type(value) is not dict:
        raise DescriptorError(field, _kind(value), "an object of tensor names")
    if "" in value:
        raise DescriptorError(field, "a tensor without a name", "names of the model's tensors")
    return list(value.items())


def _input(name: str, entry: object, regions: tuple[RegionClaim, ...]) -> InputSpan:
    if type(entry) is not list or len(entry) != 5:
        raise DescriptorError(
            f"inputs.{_short(name)}", _kind(entry), "[region index, offset, byte size, data type, shape]"
        )
    region, offset, byte_size = _span("inputs", name, entry, regions)
    type_name, shape = entry[3], entry[4]
    dtype = dtypes.BY_NAME.get(type_name) if type(type_name) is str else None
    if dtype is None:
        found = repr(_short(type_name)) if type(type_name) is str else _kind(type_name)
        raise DescriptorError(f"inputs.{_short(name)}[3]", found, f"one of {', '.join(dtypes.BY_NAME)}")
    if type(shape) is not list or len(shape) > _MAX_RANK:
        raise DescriptorError(f"inputs.{_short(name)}[4]", _kind(shape), "an array of dimensions")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_INT64:
            raise DescriptorError(f"inputs.{_short(name)}[4]", _number(size), "dimensions of 0 or more")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != byte_size:
        raise DescriptorError(f"inputs.{_short(name)}[2]", f"{byte_size}", f"{_number(nbytes)}, the size of the shape")
    return InputSpan(region, offset, byte_size, dtype, tuple(shape))


def _output(name: str, entry: object, regions: tuple[RegionClaim, ...]) -> OutputSpan:
    if type(entry) is not list or len(entry) != 3:
        raise DescriptorError(f"outputs.{_short(name)}", _kind(entry), "[region index, offset, byte size]")
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
        and offset + byte_size <= _size(regions[region])
    ):
        return region, offset, byte_size
    field = f"{group}.{_short(name)}"
    if not regions:
        raise DescriptorError(f"{field}[0]", _number(region), "no tensor at all, as there are no regions")
    _integer(field, "[0]", region, 0, len(regions) - 1)
    _integer(field, "[1]", offset, 0)
    _integer(field, "[2]", byte_size, 0)
    limit = _size(regions[region])
    raise DescriptorError(field, f"an end at byte {offset + byte_size}", f"at most {limit}, its region's size")


def _size(region: RegionClaim) -> int:
    """Return a region's size, as far as its claim tells it."""
    return region.byte_size if isinstance(region, SystemRegionClaim) else _MAX_INT64


def _integer(field: str, name: str, value: object, least: int, most: int = _MAX_INT64) -> int:
    if type(value) is int and least <= value <= most:
        return value
    place = f"{field}{name}" if name.startswith("[") else f"{field}.{name}"
    limit = f"an integer from {least} to {most}" if most < _MAX_INT64 else f"a 64-bit integer of {least} or more"
    raise DescriptorError(place, _number(value), limit)


def _check_regions_are_different(regions: tuple[RegionClaim, ...]) -> None:
    """Raise if a region is named twice: spans that seem apart could then be the same bytes."""
    seen: set[tuple[str, str]] = set()
    for index, region in enumerate(regions):
        what = ("name", region.name) if isinstance(region, NamedRegionClaim) else ("key", region.key)
        if what in seen:
            raise DescriptorError(f"regions[{index}].{what[0]}", "a region that is named before", "every region once")
        seen.add(what)


def check_outputs_are_disjoint(
    inputs: Mapping[str, InputSpan], outputs: Mapping[str, OutputSpan], place: Callable[[int], tuple[Any, int]]
) -> None:
    """Raise :class:`DescriptorError` if an output overlaps anything.

    Parameters
    ----------
    inputs, outputs : mapping
        The spans.
    place : callable
        Takes a region index; returns what memory the region is in (sortable), and where in it the region begins.
    """
    spans = [(*_interval(span, place), name) for name, span in outputs.items()]
    spans += [(*_interval(span, place), "") for span in inputs.values()]
    reach_memory, reach, reach_output = None, 0, ""
    for memory, begin, end, output in sorted(span for span in spans if span[1] < span[2]):
        if memory == reach_memory and begin < reach and (output or reach_output):
            raise DescriptorError(
                f"outputs.{_short(output or reach_output)}", "bytes of another tensor in its span", "bytes of its own"
            )
        if memory != reach_memory or end > reach:
            reach_memory, reach, reach_output = memory, end, output


def _interval(span: InputSpan | OutputSpan, place: Callable[[int], tuple[Any, int]]) -> tuple[Any, int, int]:
    memory, base = place(span.region)
    return memory, base + span.offset, base + span.offset + span.byte_size


def _kind(value: object) -> str:
    """Name a JSON value's type without showing the value, which may be a secret."""
    if value is None:
        return "null or nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "another string" if value else "an empty string"
    return "another array" if isinstance(value, list) else "an object"


def _number(value: object) -> str:
    return _short(str(value)) if type(value) is int and value.bit_length() < 256 else _kind(value)


def _short(text: str) -> str:
    printable = text.encode(errors="backslashreplace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    return printable if len(printable) <= 64 else f"{printable[:61]}..."
