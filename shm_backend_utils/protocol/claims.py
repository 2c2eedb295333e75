"""What a descriptor says of its regions: claims, read and written. No I/O."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any, Final

from ..errors import DescriptorError
from .json_checks import MAX_INT64, brief, check_fields, integer, kind_of

__all__ = [
    "CudaRegionClaim",
    "LentRegionClaim",
    "NamedRegionClaim",
    "RegionClaim",
    "SystemRegionClaim",
    "claimed_size",
    "encode_region",
    "parse_regions",
]

_HEX: Final = re.compile(r"[0-9a-f]{32}")
_HANDLE_LENGTH: Final = 64
_NAMED_FIELDS: Final = frozenset({"kind", "name"})
_SYSTEM_FIELDS: Final = frozenset({"kind", "key", "byte_size", "token", "slot"})
_CUDA_FIELDS: Final = frozenset({"kind", "handle", "byte_size", "device_uuid", "slot_region"})


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


@dataclass(frozen=True, slots=True)
class CudaRegionClaim:
    """Device memory that its owner has exported by CUDA IPC. It is all data: offsets count from its beginning.

    Attributes
    ----------
    handle : bytes
        The 64 bytes of ``cudaIpcMemHandle_t``. Who knows them could map the memory.
    byte_size : int
        Of the allocation, or less.
    device_uuid : str
        32 lowercase hexadecimal digits: the GPU. Device numbers mean something else in every process.
    slot_region : int or None
        Index of an earlier, managed region of the same descriptor, whose slot fences this memory too; None if nothing
        does.
    """

    handle: bytes
    byte_size: int
    device_uuid: str
    slot_region: int | None


@dataclass(frozen=True, slots=True)
class LentRegionClaim:
    """A managed region whose slot serves another request: that of the model that sends this one, and lends the memory.

    Attributes
    ----------
    key, byte_size, token
        As of a :class:`SystemRegionClaim`.
    slot : int
        The slot that the lender executes in.
    """

    key: str
    byte_size: int
    token: str
    slot: int


RegionClaim = SystemRegionClaim | NamedRegionClaim | CudaRegionClaim | LentRegionClaim


def encode_region(region: RegionClaim) -> dict[str, object]:
    """Return a claim as a JSON object."""
    if isinstance(region, NamedRegionClaim):
        return {"kind": "named", "name": region.name}
    if isinstance(region, CudaRegionClaim):
        return {
            "kind": "cuda",
            "handle": base64.b64encode(region.handle).decode(),
            "byte_size": region.byte_size,
            "device_uuid": region.device_uuid,
            "slot_region": region.slot_region,
        }
    return {
        "kind": "lent" if isinstance(region, LentRegionClaim) else "system",
        "key": region.key,
        "byte_size": region.byte_size,
        "token": region.token,
        "slot": region.slot,
    }


def parse_regions(values: object) -> tuple[RegionClaim, ...]:
    """Check a decoded JSON value and return it as claims, each of another region.

    Raises
    ------
    DescriptorError
        It is no array of regions. The message names the field, and never a key, a token or a handle.
    """
    if type(values) is not list:
        raise DescriptorError("regions", kind_of(values), "an array of regions")
    claims = tuple([_region(f"regions[{index}]", value) for index, value in enumerate(values)])
    _check_are_different(claims)
    for index, claim in enumerate(claims):
        if isinstance(claim, CudaRegionClaim):
            _check_slot_region(f"regions[{index}].slot_region", claim.slot_region, claims[:index])
        elif isinstance(claim, LentRegionClaim) and not isinstance(claims[0], SystemRegionClaim):
            raise DescriptorError("regions[0].kind", "another kind", "'system', the lender's own, as regions are lent")
    return claims


def claimed_size(region: RegionClaim) -> int:
    """Return a region's size, as far as its claim tells it."""
    return MAX_INT64 if isinstance(region, NamedRegionClaim) else region.byte_size


def _region(field: str, value: object) -> RegionClaim:
    if type(value) is not dict:
        raise DescriptorError(field, kind_of(value), "a region object")
    kind = value.get("kind")
    if kind == "system":
        return SystemRegionClaim(*_managed_region(field, value))
    if kind == "lent":
        return LentRegionClaim(*_managed_region(field, value))
    if kind == "cuda":
        return _cuda_region(field, value)
    if kind == "named":
        return _named_region(field, value)
    found = f"{brief(kind)!r}" if type(kind) is str else kind_of(kind)
    raise DescriptorError(f"{field}.kind", found, "'system', 'cuda', 'lent' or 'named'")


def _named_region(field: str, value: dict[str, Any]) -> NamedRegionClaim:
    check_fields(field, value, _NAMED_FIELDS)
    name = value["name"]
    if type(name) is not str or not name:
        raise DescriptorError(f"{field}.name", kind_of(name), "the name of a registered region")
    return NamedRegionClaim(name)


def _managed_region(field: str, value: dict[str, Any]) -> tuple[str, int, str, int]:
    check_fields(field, value, _SYSTEM_FIELDS)
    key = value["key"]
    if type(key) is not str:
        raise DescriptorError(f"{field}.key", kind_of(key), "a string")
    return (
        key,
        integer(field, "byte_size", value["byte_size"], 1),
        _hex(f"{field}.token", value["token"]),
        integer(field, "slot", value["slot"], 0),
    )


def _cuda_region(field: str, value: dict[str, Any]) -> CudaRegionClaim:
    check_fields(field, value, _CUDA_FIELDS)
    slot_region = value["slot_region"]
    return CudaRegionClaim(
        _handle(f"{field}.handle", value["handle"]),
        integer(field, "byte_size", value["byte_size"], 1),
        _hex(f"{field}.device_uuid", value["device_uuid"]),
        None if slot_region is None else integer(field, "slot_region", slot_region, 0),
    )


def _handle(field: str, value: object) -> bytes:
    try:
        handle = base64.b64decode(value, validate=True) if type(value) is str else b""
    except (binascii.Error, ValueError):  # the latter for characters that are not ASCII
        handle = b""
    if len(handle) != _HANDLE_LENGTH:
        raise DescriptorError(field, kind_of(value), f"{_HANDLE_LENGTH} bytes, a CUDA IPC handle, in base64")
    return handle


def _hex(field: str, value: object) -> str:
    if type(value) is not str or not _HEX.fullmatch(value):
        raise DescriptorError(field, kind_of(value), "32 lowercase hexadecimal digits")
    return value


def _check_slot_region(field: str, index: int | None, earlier: tuple[RegionClaim, ...]) -> None:
    if index is None:
        return
    if index >= len(earlier) or not isinstance(earlier[index], SystemRegionClaim | LentRegionClaim):
        raise DescriptorError(field, str(index), "the index of an earlier region of kind 'system' or 'lent', or null")


def _check_are_different(regions: tuple[RegionClaim, ...]) -> None:
    """Raise if a region is named twice: spans that seem apart could then be the same bytes."""
    seen: set[tuple[str, str | bytes]] = set()
    for index, region in enumerate(regions):
        what = _name_of(region)
        if what in seen:
            raise DescriptorError(f"regions[{index}].{what[0]}", "a region that is named before", "every region once")
        seen.add(what)


def _name_of(region: RegionClaim) -> tuple[str, str | bytes]:
    if isinstance(region, NamedRegionClaim):
        return "name", region.name
    return ("handle", region.handle) if isinstance(region, CudaRegionClaim) else ("key", region.key)
