"""Further regions of a table: memory that a request uses in addition to the region of its own slot. Pure.

::

    0  kind         u8    1 lent, 2 CUDA, 3 named, 4 CUDA by descriptor
    1  flags        u8    1 for CUDA memory that is lent for this request alone; else 0
    2  slot         u16   of a lent region: the slot that its lender executes in; of CUDA memory 1, if the client
                          waits for ``completed``
    4  fence        u16   of CUDA memory: the region whose slot fences it, 0 for the request's own; 0xffff for none
    6  name_length  u16
    8  byte_size    u64   of the whole region; 0 for a named one
   16  secret       16 bytes  the token of a lent region or of CUDA memory by descriptor; the GPU's UUID of kind 2
   32  name         a key; the 64 bytes of a CUDA IPC handle; a registered name; the 16 bytes of a GPU's UUID and a key;
                    then zeros up to a multiple of 8

A claim comes from a peer. This module makes every check that needs no opened memory.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from ..errors import TableError

__all__ = [
    "MAX_REGIONS",
    "CudaDescriptorClaim",
    "CudaRegionClaim",
    "LentRegionClaim",
    "NamedRegionClaim",
    "RegionClaim",
    "check_are_different",
    "claimed_size",
    "decode_claims",
    "encode_claim",
    "padded",
]

MAX_REGIONS: Final = 64
"""The most further regions of one table."""

_LENT: Final = 1
_CUDA: Final = 2
_NAMED: Final = 3
_CUDA_DESCRIPTOR: Final = 4
_CLAIM: Final = struct.Struct("<BBHHHQ16s")
_NO_FENCE: Final = 0xFFFF
_NOTHING: Final = bytes(16)
_HANDLE_LENGTH: Final = 64  # CUipcMemHandle, CUipcEventHandle
_UUID_LENGTH: Final = 16
_WAITS: Final = 1  # the slot of a claim of CUDA memory, if the client waits for `completed`
_FOR_ONE_REQUEST: Final = 1
_MAX_INT64: Final = 2**63 - 1
_KEY: Final = re.compile(r"shmbu-[0-9a-z-]{1,64}")


@dataclass(frozen=True, slots=True)
class LentRegionClaim:
    """A managed region of a client, lent by the model that executes its request to another model that it calls."""

    key: str  # in /dev/shm, without a slash
    byte_size: int  # of the whole region
    token: str  # the secret in the region's header: 32 lowercase hexadecimal digits
    slot: int  # the slot in which the lender executes its request


@dataclass(frozen=True, slots=True)
class CudaRegionClaim:
    """Device memory that its owner has exported by CUDA IPC, without a header: offsets count from its beginning."""

    handle: bytes  # 64 bytes, CUipcMemHandle: a secret that suffices to map the memory
    byte_size: int  # of the allocation, or less
    device_uuid: str  # 32 lowercase hexadecimal digits; device numbers differ between processes
    # The region whose slot also fences this memory: 0 for the request's own region, or the number of a lent region.
    # None without a fence.
    fence: int | None
    # Whether the client waits for the slot's `completed`. If so, the model may answer while its GPU still works in this
    # memory, and leave it to its GPU to write `completed`.
    waits: bool = False
    # Whether the memory is lent for this request alone. If so, the model borrows the slot that fences the memory, and,
    # before it answers, unmaps the memory and then gives the slot back.
    is_for_one_request: bool = False


@dataclass(frozen=True, slots=True)
class CudaDescriptorClaim:
    """Device memory that its owner hands over by a descriptor, as it does sealed regions. It has no header, either."""

    key: str  # of the handover, as that of a sealed region
    byte_size: int  # of the whole allocation
    token: str  # the secret for the handover: 32 lowercase hexadecimal digits
    device_uuid: str  # as in CudaRegionClaim
    fence: int  # as in CudaRegionClaim; there is always one
    waits: bool = False  # as in CudaRegionClaim


@dataclass(frozen=True, slots=True)
class NamedRegionClaim:
    """A foreign region, by its registered name: offsets count from the registered part's beginning. It has no fence."""

    name: str


RegionClaim = LentRegionClaim | CudaRegionClaim | CudaDescriptorClaim | NamedRegionClaim


def claimed_size(claim: RegionClaim) -> int:
    """Return the size in bytes that a claim gives; for a named region, whose claim gives none, the largest number."""
    return _MAX_INT64 if isinstance(claim, NamedRegionClaim) else claim.byte_size


def padded(data: bytes) -> bytes:
    """Return data, filled up with zeros to a multiple of 8 bytes."""
    return data + bytes(-len(data) % 8)


def encode_claim(claim: RegionClaim) -> bytes:
    """Return a claim in its binary form."""
    if isinstance(claim, LentRegionClaim):
        name, token = claim.key.encode(), bytes.fromhex(claim.token)
        return _CLAIM.pack(_LENT, 0, claim.slot, _NO_FENCE, len(name), claim.byte_size, token) + padded(name)
    if isinstance(claim, CudaRegionClaim):
        fence, uuid = _NO_FENCE if claim.fence is None else claim.fence, bytes.fromhex(claim.device_uuid)
        flags, waits = _FOR_ONE_REQUEST if claim.is_for_one_request else 0, _WAITS if claim.waits else 0
        return _CLAIM.pack(_CUDA, flags, waits, fence, _HANDLE_LENGTH, claim.byte_size, uuid) + claim.handle
    if isinstance(claim, CudaDescriptorClaim):
        name, token = bytes.fromhex(claim.device_uuid) + claim.key.encode(), bytes.fromhex(claim.token)
        waits = _WAITS if claim.waits else 0
        return _CLAIM.pack(_CUDA_DESCRIPTOR, 0, waits, claim.fence, len(name), claim.byte_size, token) + padded(name)
    name = claim.name.encode()
    return _CLAIM.pack(_NAMED, 0, 0, _NO_FENCE, len(name), 0, _NOTHING) + padded(name)


def decode_claims(data: bytes, begin: int, end: int, count: int) -> tuple[tuple[RegionClaim, ...], int]:
    """Read the further regions from a table's copy; also return where they end. A TableError reveals no secret."""
    if count > MAX_REGIONS:
        raise TableError("region_count", str(count), f"at most {MAX_REGIONS}")
    claims: list[RegionClaim] = []
    for index in range(count):
        field = f"regions[{index + 1}]"
        if begin + _CLAIM.size > end:
            raise TableError(field, "the table's end", "a region")
        kind, flags, slot, fence, length, byte_size, secret = _CLAIM.unpack_from(data, begin)
        name = data[begin + _CLAIM.size : begin + _CLAIM.size + length]
        begin += _CLAIM.size + length + -length % 8
        if begin > end:
            raise TableError(f"{field}.name_length", str(length), "a name inside the table")
        if flags and (flags != _FOR_ONE_REQUEST or kind != _CUDA):
            raise TableError(f"{field}.flags", str(flags), "0, or 1 where CUDA memory is lent for this request alone")
        claims.append(_claim(field, kind, flags, slot, fence, byte_size, secret, name))
    found = tuple(claims)
    if count > 1:
        check_are_different(found)
    for index, claim in enumerate(found):
        fence = isinstance(claim, CudaRegionClaim | CudaDescriptorClaim) and claim.fence
        if fence and (fence > index or not isinstance(found[fence - 1], LentRegionClaim)):
            expected = "0, or the number of an earlier region that is lent"
            raise TableError(f"regions[{index + 1}].fence", str(fence), expected)
    return found, begin


def _claim(
    field: str, kind: int, flags: int, slot: int, fence: int, byte_size: int, secret: bytes, name: bytes
) -> RegionClaim:
    if kind == _NAMED:
        return NamedRegionClaim(_text(field, name))
    if kind not in (_LENT, _CUDA, _CUDA_DESCRIPTOR):
        raise TableError(f"{field}.kind", str(kind), f"{_LENT}, {_CUDA}, {_NAMED} or {_CUDA_DESCRIPTOR}")
    if not 1 <= byte_size <= _MAX_INT64:
        raise TableError(f"{field}.byte_size", str(byte_size), "a size from 1 to 2^63 - 1")
    if kind == _CUDA:
        if len(name) not in (_HANDLE_LENGTH, 2 * _HANDLE_LENGTH):
            expected = f"{_HANDLE_LENGTH}, as a CUDA IPC handle has, or {2 * _HANDLE_LENGTH} with that of an event"
            raise TableError(f"{field}.name_length", str(len(name)), expected)
        if flags and fence == _NO_FENCE:
            raise TableError(f"{field}.fence", str(fence), "the slot that fences what is lent for this request alone")
        fenced_by = None if fence == _NO_FENCE else fence
        # An event's handle may follow, of a client that does not wait for `completed`.
        return CudaRegionClaim(name[:_HANDLE_LENGTH], byte_size, secret.hex(), fenced_by, slot == _WAITS, bool(flags))
    begin = _UUID_LENGTH if kind == _CUDA_DESCRIPTOR else 0
    key = _text(field, name[begin:])
    if not _KEY.fullmatch(key):
        raise TableError(f"{field}.name", "other text", "the key of a managed region, or of memory by descriptor")
    if kind == _LENT:
        return LentRegionClaim(key, byte_size, secret.hex(), slot)
    if fence == _NO_FENCE:
        raise TableError(f"{field}.fence", str(fence), "the slot that fences memory by descriptor")
    return CudaDescriptorClaim(key, byte_size, secret.hex(), name[:begin].hex(), fence, slot == _WAITS)


def _text(field: str, name: bytes) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text:
        raise TableError(f"{field}.name", "no valid name", "a name in UTF-8")
    return text


def check_are_different(claims: tuple[RegionClaim, ...], group: str = "regions", first: int = 1) -> None:
    """Raise TableError if ``group`` names a region twice: overlapping spans in that region would seem apart."""
    seen: set[str | bytes] = set()
    for index, claim in enumerate(claims, first):
        name = _name_of(claim)
        if name in seen:
            raise TableError(f"{group}[{index}]", "a region that is named before", "every region once")
        seen.add(name)


def _name_of(claim: RegionClaim) -> str | bytes:
    if isinstance(claim, CudaRegionClaim):
        return claim.handle
    return f"registered {claim.name}" if isinstance(claim, NamedRegionClaim) else claim.key
