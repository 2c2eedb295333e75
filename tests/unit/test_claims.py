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
    claimed_size,
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


@pytest.mark.parametrize(
    "claims",
    [(), (LENT,), (NAMED,), (UNFENCED,), (LENT, CUDA), (NAMED, LENT, UNFENCED, CUDA), (FOR_ONE_REQUEST, WITH_EVENT)],
    ids=str,
)
def test_what_is_written_is_read(claims: tuple[RegionClaim, ...]) -> None:
    assert decoded(encoded(*claims), len(claims)) == claims


def test_regions_lie_byte_by_byte_as_they_are_drawn() -> None:
    assert encode_claim(LENT) == claim(1, KEY.encode(), slot=2, size=12288)
    assert encode_claim(CUDA) == claim(2, HANDLE, fence=0, size=4096).replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    event = claim(2, bytes(64) + HANDLE, fence=0, size=4096)
    assert encode_claim(WITH_EVENT) == event.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    lent = claim(2, FOR_ONE_REQUEST.handle, flags=1, fence=0, size=4096)
    assert encode_claim(FOR_ONE_REQUEST) == lent.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    assert encode_claim(NAMED) == claim(3, NAMED.name.encode(), size=0).replace(bytes.fromhex(TOKEN), bytes(16))


def test_a_claim_tells_its_size_if_it_knows_it() -> None:
    assert [claimed_size(each) for each in (LENT, CUDA, NAMED)] == [12288, 4096, 2**63 - 1]


def test_several_allocations_may_have_one_fence() -> None:
    fenced = [CudaRegionClaim(bytes([number]) * 64, 4096, UUID, 1) for number in range(3)]
    assert decoded(encoded(LENT, *fenced), 4) == (LENT, *fenced)


def test_there_may_be_64_regions_and_no_more() -> None:
    regions = [NamedRegionClaim(str(number)) for number in range(MAX_REGIONS + 1)]
    data = encoded(*regions)
    assert len(decoded(data[:-40], MAX_REGIONS)) == MAX_REGIONS
    assert refusal(data, MAX_REGIONS + 1).field == "region_count"


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_another_kind_is_refused(kind: int) -> None:
    assert refusal(claim(kind, b"x")).field == "regions[1].kind"


@pytest.mark.parametrize("size", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize(("kind", "name"), [(1, KEY.encode()), (2, HANDLE)])
def test_a_size_that_no_memory_has_is_refused(kind: int, name: bytes, size: int) -> None:
    assert refusal(claim(kind, name, size=size)).field == "regions[1].byte_size"


@pytest.mark.parametrize("key", ["shmbu-", "weights", "shmbu-A", "shmbu-a/b", "shmbu-../x", "shmbu-" + "a" * 65])
def test_what_is_no_key_is_refused(key: str) -> None:
    assert refusal(claim(1, key.encode())).field == "regions[1].name"


@pytest.mark.parametrize("name", [b"", b"\xff", b"a\0b", b"\xed\xa0\x80"])
@pytest.mark.parametrize("kind", [1, 3])
def test_what_is_no_name_is_refused(kind: int, name: bytes) -> None:
    assert refusal(claim(kind, name)).field == "regions[1].name"


@pytest.mark.parametrize("length", [0, 1, 63, 65, 127, 129, 192])
def test_what_is_no_handle_is_refused(length: int) -> None:
    assert refusal(claim(2, bytes(length))).field == "regions[1].name_length"


@pytest.mark.parametrize("fence", [1, 2, 3, 4, NO_FENCE - 1], ids=["itself", "named", "later", "none", "the largest"])
def test_only_an_earlier_lent_region_fences_gpu_memory(fence: int) -> None:
    data = claim(2, HANDLE, fence=fence) + encode_claim(NAMED) + encode_claim(LENT)
    error = refusal(data, 3)
    assert (error.field, error.found) == ("regions[1].fence", str(fence))


@pytest.mark.parametrize("other", [NAMED, UNFENCED], ids=["named", "cuda"])
def test_an_earlier_region_of_another_kind_fences_nothing(other: RegionClaim) -> None:
    assert refusal(encode_claim(other) + claim(2, HANDLE, fence=1), 2).field == "regions[2].fence"


@pytest.mark.parametrize("twice", [LENT, CUDA, NAMED], ids=["lent", "cuda", "named"])
def test_memory_that_is_named_twice_is_refused(twice: RegionClaim) -> None:
    assert refusal(encode_claim(UNFENCED) + encode_claim(twice) * 2, 3).field == "regions[3]"


def test_another_size_or_token_makes_no_other_memory() -> None:
    again = LentRegionClaim(KEY, 4096, "0" * 32, 0)
    assert refusal(encode_claim(LENT) + encode_claim(again), 2).field == "regions[2]"


def test_a_name_may_be_that_of_a_key() -> None:
    regions = (LENT, NamedRegionClaim(KEY))
    assert decoded(encoded(*regions), 2) == regions


@pytest.mark.parametrize("length", range(0, 56, 8))
def test_a_region_that_breaks_off_is_refused(length: int) -> None:
    assert refusal(encode_claim(LENT)[:length]).field.startswith("regions[1]")


def test_a_name_that_is_longer_than_the_table_is_refused() -> None:
    assert refusal(claim(3, b"weights", length=65535)).field == "regions[1].name_length"


@pytest.mark.parametrize("name", [KEY.encode(), b"weights"])
def test_only_gpu_memory_is_lent_for_one_request(name: bytes) -> None:
    kind = 1 if name == KEY.encode() else 3
    assert refusal(claim(kind, name, flags=1)).field == "regions[1].flags"


@pytest.mark.parametrize("flags", [2, 3, 255])
def test_a_flag_that_is_not_known_is_refused(flags: int) -> None:
    error = refusal(claim(2, HANDLE, fence=0, flags=flags))
    assert (error.field, error.found) == ("regions[1].flags", str(flags))


def test_what_is_lent_for_one_request_has_a_fence() -> None:
    assert refusal(claim(2, HANDLE, flags=1)).field == "regions[1].fence"


def test_what_is_lent_for_one_request_may_be_fenced_by_a_lent_region() -> None:
    lent = CudaRegionClaim(HANDLE, 4096, UUID, 1, b"", True)
    assert decoded(encoded(LENT, lent), 2) == (LENT, lent)


def test_another_event_makes_no_other_memory() -> None:
    again = CudaRegionClaim(HANDLE, 4096, UUID, 0, bytes(64))
    assert refusal(encoded(CUDA, again), 2).field == "regions[2]"
