"""Further regions of a table: each field comes from a peer, and may be hostile."""

from __future__ import annotations

import struct

import pytest

from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol.claims import (
    MAX_REGIONS,
    CudaRegionClaim,
    LentRegionClaim,
    NamedRegionClaim,
    RegionClaim,
    decode_claims,
    encode_claim,
)

KEY = "shmbu-4711-5ec7e75ec7e7"
TOKEN = "0123456789abcdef" * 2
UUID = "fedcba9876543210" * 2
HANDLE = bytes(range(64))
LENT = LentRegionClaim(KEY, 12288, TOKEN, 2)
CUDA = CudaRegionClaim(HANDLE, 4096, UUID, 0)
WITH_EVENT = CudaRegionClaim(bytes(64), 4096, UUID, 0, HANDLE)
FOR_ONE_REQUEST = CudaRegionClaim(HANDLE[1:] + b"x", 4096, UUID, 0, b"", True)
UNFENCED = CudaRegionClaim(HANDLE[::-1], 2**63 - 1, UUID, None)
NAMED = NamedRegionClaim("weights é")
NO_FENCE = 0xFFFF
NAMES = {1: KEY.encode(), 2: HANDLE}
"""Those of regions that have a size, by their kind."""


def claim(
    kind: int, name: bytes, *, slot: int = 0, fence: int = NO_FENCE, size: int = 1, flags: int = 0, length: int = -1
) -> bytes:
    """Return a region byte by byte as it is drawn."""
    length = len(name) if length < 0 else length
    head = struct.pack("<BBHHHQ", kind, flags, slot, fence, length, size)
    return head + bytes.fromhex(TOKEN) + name.ljust(-(-len(name) // 8) * 8, b"\0")


def encoded(*claims: RegionClaim) -> bytes:
    return b"".join([encode_claim(claim) for claim in claims])


def decoded(data: bytes, count: int = 1) -> tuple[RegionClaim, ...]:
    claims, end = decode_claims(data, 0, len(data), count)
    assert end == len(data)
    return claims


def refusal(data: bytes, count: int = 1) -> TableError:
    """Return the error that refuses these regions, once it is known to hold no secret."""
    with pytest.raises(TableError) as caught:
        decoded(data, count)
    message = str(caught.value)
    assert len(message) < 300
    for secret in (KEY, TOKEN, UUID, HANDLE.hex(), repr(HANDLE)):
        assert secret not in message
    return caught.value


def test_regions_lie_byte_by_byte_as_they_are_drawn() -> None:
    assert encode_claim(LENT) == claim(1, KEY.encode(), slot=2, size=12288)
    assert encode_claim(CUDA) == claim(2, HANDLE, fence=0, size=4096).replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    event = claim(2, bytes(64) + HANDLE, fence=0, size=4096)
    assert encode_claim(WITH_EVENT) == event.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    lent = claim(2, FOR_ONE_REQUEST.handle, flags=1, fence=0, size=4096)
    assert encode_claim(FOR_ONE_REQUEST) == lent.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    assert encode_claim(NAMED) == claim(3, NAMED.name.encode(), size=0).replace(bytes.fromhex(TOKEN), bytes(16))


def test_there_may_be_64_regions_and_no_more() -> None:
    regions = [NamedRegionClaim(str(number)) for number in range(MAX_REGIONS + 1)]
    data = encoded(*regions)
    assert len(decoded(data[:-40], MAX_REGIONS)) == MAX_REGIONS
    assert refusal(data, MAX_REGIONS + 1).field == "region_count"


REFUSED = [
    *((claim(kind, b"x"), "kind") for kind in (0, 4, 255)),
    *((claim(kind, name, size=size), "byte_size") for kind, name in NAMES.items() for size in (0, 2**63, 2**64 - 1)),
    *((claim(1, key), "name") for key in (b"shmbu-", b"weights", b"shmbu-a/b", b"shmbu-../x", b"shmbu-" + b"a" * 65)),
    *((claim(kind, name), "name") for kind in (1, 3) for name in (b"", b"\xff", b"a\0b", b"\xed\xa0\x80")),
    *((claim(2, bytes(length)), "name_length") for length in (0, 1, 63, 65, 127, 129, 192)),
    (claim(3, b"weights", length=65535), "name_length"),
    *((claim(2, HANDLE, fence=fence), "fence") for fence in (1, 4, NO_FENCE - 1)),
    (claim(2, HANDLE, flags=1), "fence"),
    *((claim(2, HANDLE, fence=0, flags=flags), "flags") for flags in (2, 3, 255)),
    *((claim(kind, name, flags=1), "flags") for kind, name in ((1, KEY.encode()), (3, b"weights"))),
]


@pytest.mark.parametrize(("data", "field"), REFUSED, ids=str)
def test_a_region_that_there_cannot_be_is_refused(data: bytes, field: str) -> None:
    assert refusal(data).field == f"regions[1].{field}"


@pytest.mark.parametrize(
    ("data", "count", "field"),
    [
        (claim(2, HANDLE, fence=2) + encoded(NAMED, LENT), 3, "regions[1].fence"),
        (claim(2, HANDLE, fence=3) + encoded(NAMED, LENT), 3, "regions[1].fence"),
        (encode_claim(NAMED) + claim(2, HANDLE, fence=1), 2, "regions[2].fence"),
        (encode_claim(UNFENCED) + claim(2, HANDLE, fence=1), 2, "regions[2].fence"),
        (encoded(UNFENCED, LENT, LENT), 3, "regions[3]"),
        (encoded(LENT, LentRegionClaim(KEY, 4096, "0" * 32, 0)), 2, "regions[2]"),
        (encoded(CUDA, CudaRegionClaim(HANDLE, 4096, UUID, 0, bytes(64))), 2, "regions[2]"),
        (encoded(NAMED, NAMED), 2, "regions[2]"),
    ],
)
def test_a_region_that_does_not_agree_with_another_is_refused(data: bytes, count: int, field: str) -> None:
    assert refusal(data, count).field == field


@pytest.mark.parametrize("length", range(0, 56, 8))
def test_a_region_that_breaks_off_is_refused(length: int) -> None:
    assert refusal(encode_claim(LENT)[:length]).field.startswith("regions[1]")
