"""The request parameters that name memory. Pure.

``shm_slot`` and ``shm_generation`` name a request's slot. ``shm_io`` is for tools that register regions themselves. It
describes tensors without a slot: ``{"v": 1, "model": NAME, "regions": […], "inputs": {…}, "outputs": {…}}``, in JSON or
in hexadecimal digits of JSON. Nothing fences such a request, and the model writes no results.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, Final, NamedTuple

from .. import dtypes
from ..errors import TableError, VersionError
from .claims import CudaRegionClaim, NamedRegionClaim, RegionClaim, check_are_different, claimed_size
from .layout import MAX_SLOT_COUNT, VERSION
from .spans import InputSpan, OutputSpan, Table, brief, check_outputs_are_apart
from .table import MAX_RANK, check_element_count

__all__ = [
    "DESCRIPTOR_PARAMETER",
    "GENERATION_PARAMETER",
    "MAX_DESCRIPTOR_LENGTH",
    "SLOT_PARAMETER",
    "SlotAddress",
    "encode_descriptor",
    "parse_address",
    "parse_descriptor",
    "parse_generation",
]

SLOT_PARAMETER: Final = "shm_slot"
GENERATION_PARAMETER: Final = "shm_generation"
DESCRIPTOR_PARAMETER: Final = "shm_io"
MAX_DESCRIPTOR_LENGTH: Final = 16 * 1024

_MAX_INT64: Final = 2**63 - 1
_ADDRESS: Final = re.compile(r"([^/]+)/(shmbu-[0-9a-z-]{1,64})/([0-9a-f]{32})/(0|[1-9][0-9]{0,3})")
_DESCRIPTOR_VERSION: Final = 1
_UUID: Final = re.compile(r"[0-9a-f]{32}")
_HANDLE_LENGTH: Final = 64
_FIELDS: Final = frozenset({"v", "model", "regions", "inputs", "outputs"})
_NAMED_FIELDS: Final = frozenset({"kind", "name"})
_CUDA_FIELDS: Final = frozenset({"kind", "handle", "byte_size", "device_uuid"})
_MANAGED: Final = ("system", "lent")  # version 1 described these kinds in shm_io; version 2 names a slot


class SlotAddress(NamedTuple):
    """The slot that a request uses, and the model that must execute the request."""

    model: str  # an ensemble passes the address to all steps; models other than this one ignore it
    key: str  # of the region, without a slash; it begins with shmbu-
    token: str  # the secret in the region's header: 32 lowercase hexadecimal digits
    slot: int

    def __str__(self) -> str:
        """Return the value of ``shm_slot``."""
        return f"{VERSION}/{self.model}/{self.key}/{self.token}/{self.slot}"


def parse_address(value: Any) -> SlotAddress:
    """Read the value of ``shm_slot``; TableError if it is no address, VersionError if the version is another."""
    if type(value) is not str:
        raise TableError(SLOT_PARAMETER, f"a value of type {type(value).__name__}", "a string")
    version, _, rest = value.partition("/")
    if version != str(VERSION):
        raise VersionError(version if version.isdecimal() and len(version) < 8 else "none", VERSION)
    found = _ADDRESS.fullmatch(rest)
    if found is None or int(found[4]) >= MAX_SLOT_COUNT:
        raise TableError(SLOT_PARAMETER, "other text", f"{VERSION}/MODEL/KEY/TOKEN/SLOT")
    return SlotAddress(found[1], found[2], found[3], int(found[4]))


def parse_generation(value: Any) -> int:
    """Return the value of ``shm_generation``; raise :class:`TableError` if it is no generation."""
    if type(value) is int and 1 <= value <= _MAX_INT64:
        return value
    raise TableError(GENERATION_PARAMETER, "another value", "an integer from 1 to 2^63 - 1")


def encode_descriptor(model: str, table: Table) -> str:
    """Return the value of ``shm_io`` for a table of named and CUDA regions; TableError if it is too long."""
    value = {
        "v": _DESCRIPTOR_VERSION,
        "model": model,
        "regions": [_encode_region(claim) for claim in table.regions],
        "inputs": {
            name: [span.region - 1, span.offset, span.byte_size, span.dtype.name, span.shape]
            for name, span in table.inputs.items()
        },
        "outputs": {name: [span.region - 1, span.offset, span.byte_size] for name, span in table.outputs.items()},
    }
    text = json.dumps(value, separators=(",", ":"))
    _check_length(text)
    return text


def parse_descriptor(text: Any) -> tuple[str, Table]:
    """Return the model and the table, without a region 0, in a value of ``shm_io``; TableError reveals no secret."""
    if type(text) is not str:
        raise TableError(DESCRIPTOR_PARAMETER, f"a value of type {type(text).__name__}", "a string")
    _check_length(text)
    value = _decoded(text)
    if type(value) is not dict:
        raise TableError(DESCRIPTOR_PARAMETER, _kind_of(value), "a JSON object")
    version = value.get("v")
    if type(version) is not int or version != _DESCRIPTOR_VERSION:
        raise TableError(_field("v"), _shown(version), str(_DESCRIPTOR_VERSION))
    regions = value.get("regions")
    if isinstance(regions, list) and any(isinstance(each, dict) and each.get("kind") in _MANAGED for each in regions):
        raise VersionError(str(_DESCRIPTOR_VERSION), VERSION)
    # This refuses unknown members, as ignoring one would hide a client's mistake.
    _check_members("", value, _FIELDS)
    model = value["model"]
    if type(model) is not str or not model:
        raise TableError(_field("model"), _kind_of(model), "the name of a model")
    if type(regions) is not list:
        raise TableError(_field("regions"), _kind_of(regions), "an array of regions")
    claims = tuple([_region(f"regions[{index}]", each) for index, each in enumerate(regions)])
    check_are_different(claims, f"{DESCRIPTOR_PARAMETER}.regions", first=0)
    inputs = {name: _input(name, entry, claims) for name, entry in _entries("inputs", value["inputs"])}
    outputs = {name: _output(name, entry, claims) for name, entry in _entries("outputs", value["outputs"])}
    table = Table(inputs, outputs, claims)
    check_outputs_are_apart(table)
    return model, table


def _encode_region(claim: RegionClaim) -> dict[str, object]:
    if isinstance(claim, NamedRegionClaim):
        return {"kind": "named", "name": claim.name}
    assert isinstance(claim, CudaRegionClaim)
    handle = base64.b64encode(claim.handle).decode()
    return {"kind": "cuda", "handle": handle, "byte_size": claim.byte_size, "device_uuid": claim.device_uuid}


def _decoded(text: str) -> object:
    """Return the value of a text in JSON, or in hexadecimal digits of JSON; no object's text has both forms."""
    try:
        try:
            return json.loads(text)
        except ValueError:
            return json.loads(binascii.unhexlify(text).decode())
    except (ValueError, RecursionError):
        raise TableError(
            DESCRIPTOR_PARAMETER, "text that is not JSON", "a JSON object, as it is or in hexadecimal"
        ) from None


def _check_length(text: str) -> None:
    if len(text) > MAX_DESCRIPTOR_LENGTH:
        raise TableError(DESCRIPTOR_PARAMETER, f"{len(text)} characters", f"at most {MAX_DESCRIPTOR_LENGTH}")


def _region(field: str, value: object) -> RegionClaim:
    if type(value) is not dict:
        raise TableError(_field(field), _kind_of(value), "a region object")
    kind = value.get("kind")
    if kind == "named":
        _check_members(field, value, _NAMED_FIELDS)
        name = value["name"]
        if type(name) is not str or not name:
            raise TableError(_field(f"{field}.name"), _kind_of(name), "the name of a registered region")
        return NamedRegionClaim(name)
    if kind != "cuda":
        raise TableError(
            _field(f"{field}.kind"),
            f"'{brief(kind)}'" if type(kind) is str else _kind_of(kind),
            "'named' or 'cuda'",
        )
    _check_members(field, value, _CUDA_FIELDS)
    uuid = value["device_uuid"]
    if type(uuid) is not str or not _UUID.fullmatch(uuid):
        raise TableError(_field(f"{field}.device_uuid"), _kind_of(uuid), "32 lowercase hexadecimal digits")
    size = _integer(f"{field}.byte_size", value["byte_size"], 1)
    return CudaRegionClaim(_handle(f"{field}.handle", value["handle"]), size, uuid, None)


def _handle(field: str, value: object) -> bytes:
    try:
        handle = base64.b64decode(value, validate=True) if type(value) is str else b""
    except ValueError:  # binascii.Error is one
        handle = b""
    if len(handle) != _HANDLE_LENGTH:
        raise TableError(_field(field), _kind_of(value), f"{_HANDLE_LENGTH} bytes, a CUDA IPC handle, in base64")
    return handle


def _entries(group: str, value: object) -> list[tuple[str, Any]]:
    if type(value) is not dict:
        raise TableError(_field(group), _kind_of(value), "an object of tensor names")
    if "" in value:
        raise TableError(_field(group), "a tensor without a name", "names of the model's tensors")
    return list(value.items())


def _input(name: str, entry: object, claims: tuple[RegionClaim, ...]) -> InputSpan:
    field = f"inputs.{brief(name)}"
    if type(entry) is not list or len(entry) != 5:
        raise TableError(_field(field), _kind_of(entry), "[region index, offset, byte size, data type, shape]")
    region, offset, byte_size = _span(field, entry, claims)
    type_name, shape = entry[3], entry[4]
    dtype = dtypes.BY_NAME.get(type_name) if type(type_name) is str else None
    if dtype is None:
        found = f"'{brief(type_name)}'" if type(type_name) is str else _kind_of(type_name)
        raise TableError(_field(f"{field}[3]"), found, f"one of {', '.join(dtypes.BY_NAME)}")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise TableError(_field(f"{field}[4]"), _kind_of(shape), f"an array of at most {MAX_RANK} dimensions")
    dims = tuple([_integer(f"{field}[4]", size, 0) for size in shape])
    check_element_count(_field(field), dtype, dims, byte_size)
    return InputSpan(dtype, dims, region, offset, byte_size)


def _output(name: str, entry: object, claims: tuple[RegionClaim, ...]) -> OutputSpan:
    field = f"outputs.{brief(name)}"
    if type(entry) is not list or len(entry) != 3:
        raise TableError(_field(field), _kind_of(entry), "[region index, offset, byte size]")
    return OutputSpan(*_span(field, entry, claims))


def _span(field: str, entry: list[Any], claims: tuple[RegionClaim, ...]) -> tuple[int, int, int]:
    if not claims:
        raise TableError(_field(f"{field}[0]"), _shown(entry[0]), "no tensors, as regions is empty")
    region = _integer(f"{field}[0]", entry[0], 0, len(claims) - 1)
    offset, byte_size = _integer(f"{field}[1]", entry[1], 0), _integer(f"{field}[2]", entry[2], 0)
    limit = claimed_size(claims[region])
    if offset + byte_size > limit:
        raise TableError(_field(field), f"an end at byte {offset + byte_size}", f"at most {limit}, its region's size")
    return region + 1, offset, byte_size


def _check_members(field: str, value: dict[str, Any], expected: frozenset[str]) -> None:
    inside = f"{field}." if field else ""
    for name in sorted(expected - value.keys()):
        raise TableError(_field(f"{inside}{name}"), "nothing", "this field")
    for name in sorted(value.keys() - expected):
        raise TableError(_field(f"{inside}{brief(name)}"), "an unknown field", f"only {', '.join(sorted(expected))}")


def _integer(field: str, value: object, least: int, most: int = _MAX_INT64) -> int:
    if type(value) is int and least <= value <= most:
        return value
    limit = f"an integer from {least} to {most}" if most < _MAX_INT64 else f"a 64-bit integer of {least} or more"
    raise TableError(_field(field), _shown(value), limit)


def _field(name: str) -> str:
    return f"{DESCRIPTOR_PARAMETER}.{name}"


def _kind_of(value: object) -> str:
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


def _shown(value: object) -> str:
    """Return a number as text, or the kind of another value."""
    return brief(str(value)) if type(value) is int and value.bit_length() < 256 else _kind_of(value)
