"""Claims of regions, read and written: above all those of GPU memory, each field of which may be hostile."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import DescriptorError
from shm_backend_utils.protocol.claims import (
    CudaRegionClaim,
    NamedRegionClaim,
    RegionClaim,
    SystemRegionClaim,
    claimed_size,
    encode_region,
    parse_regions,
)
from shm_backend_utils.protocol.json_checks import MAX_INT64

KEY = "shmbu-4711-5ec7e75ec7e7"
TOKEN = "0123456789abcdef" * 2
UUID = "fedcba9876543210" * 2
HANDLE = bytes(range(64))
SYSTEM = SystemRegionClaim(KEY, 12288, TOKEN, slot=2)
CUDA = CudaRegionClaim(HANDLE, 4096, UUID, slot_region=0)
UNFENCED = CudaRegionClaim(HANDLE, 4096, UUID, slot_region=None)
NAMED = NamedRegionClaim("weights")

HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)
TEXTS = st.binary(min_size=1).map(lambda raw: raw.decode("latin-1"))
SIZES = st.integers(1, MAX_INT64)
SYSTEMS = st.builds(SystemRegionClaim, TEXTS, SIZES, HEX, st.integers(0, MAX_INT64))
NAMES = st.builds(NamedRegionClaim, TEXTS)
UNFENCED_ONES = st.builds(CudaRegionClaim, st.binary(min_size=64, max_size=64), SIZES, HEX, st.none())


def encoded(*claims: RegionClaim) -> list[dict[str, Any]]:
    """Return claims as JSON's types, free to be broken."""
    decoded: list[dict[str, Any]] = json.loads(json.dumps([encode_region(claim) for claim in claims]))
    return decoded


def text_of(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


def refusal(values: object) -> DescriptorError:
    """Return the error that refuses these regions, once it is known to name its field and no secret."""
    with pytest.raises(DescriptorError) as caught:
        parse_regions(values)
    message = str(caught.value)
    assert message.startswith(f"request parameter shm_io.{caught.value.field}: found {caught.value.found}, expected ")
    for secret in (KEY, TOKEN, UUID, text_of(HANDLE), text_of(HANDLE)[:32], HANDLE.hex(), repr(HANDLE)):
        assert secret not in message
    return caught.value


def refusal_with(field: str, wrong: object) -> DescriptorError:
    """Return the error that refuses GPU memory with one field changed."""
    values = encoded(SYSTEM, CUDA)
    values[1][field] = wrong
    return refusal(values)


# Round trips


@pytest.mark.parametrize(
    "claims", [(), (SYSTEM,), (NAMED,), (UNFENCED,), (SYSTEM, CUDA), (NAMED, SYSTEM, UNFENCED)], ids=str
)
def test_what_is_written_is_read(claims: tuple[RegionClaim, ...]) -> None:
    assert parse_regions(encoded(*claims)) == claims


@given(st.lists(SYSTEMS | NAMES | UNFENCED_ONES, max_size=3, unique_by=lambda claim: (type(claim), _identity(claim))))
def test_whatever_is_written_is_read(claims: list[RegionClaim]) -> None:
    assert parse_regions(encoded(*claims)) == tuple(claims)


def _identity(claim: RegionClaim) -> object:
    if isinstance(claim, CudaRegionClaim):
        return claim.handle
    return claim.name if isinstance(claim, NamedRegionClaim) else claim.key


def test_gpu_memory_is_written_as_the_protocol_shows() -> None:
    assert encode_region(CUDA) == {
        "kind": "cuda",
        "handle": text_of(HANDLE),
        "byte_size": 4096,
        "device_uuid": UUID,
        "slot_region": 0,
    }


def test_a_claim_tells_its_size_if_it_knows_it() -> None:
    assert [claimed_size(claim) for claim in (SYSTEM, CUDA, NAMED)] == [12288, 4096, MAX_INT64]


def test_several_allocations_may_have_one_slot() -> None:
    other = CudaRegionClaim(HANDLE[::-1], 1, UUID, slot_region=0)
    assert parse_regions(encoded(SYSTEM, CUDA, other)) == (SYSTEM, CUDA, other)


# Hostile fields


@pytest.mark.parametrize("values", [None, True, 1, "regions", {}, {"0": {}}])
def test_what_is_no_array_of_regions_is_refused(values: object) -> None:
    assert refusal(values).field == "regions"


@pytest.mark.parametrize("field", ["handle", "byte_size", "device_uuid", "slot_region"])
def test_a_missing_field_of_gpu_memory_is_refused(field: str) -> None:
    values = encoded(SYSTEM, CUDA)
    del values[1][field]
    assert refusal(values).field == f"regions[1].{field}"


@pytest.mark.parametrize("field", ["key", "token", "slot", "device_id", ""])
def test_gpu_memory_has_no_field_of_another_kind(field: str) -> None:
    assert refusal_with(field, 1).field == f"regions[1].{field}"


@pytest.mark.parametrize("kind", ["CUDA", "gpu", "cuda ", "", None, 2, True, ["cuda"], {"cuda": 1}])
def test_another_kind_is_refused_with_the_kinds_that_there_are(kind: object) -> None:
    error = refusal_with("kind", kind)
    assert (error.field, error.expected) == ("regions[1].kind", "'system', 'cuda', 'lent' or 'named'")


@pytest.mark.parametrize(
    "handle",
    [
        *(None, True, 64, 1.5, [], {}, list(HANDLE), ""),
        *(text_of(HANDLE[:-1]), text_of(HANDLE + b"\0"), text_of(b""), text_of(HANDLE * 100)),
        *(text_of(HANDLE)[:-1], text_of(HANDLE)[:-2], text_of(HANDLE) + "=", text_of(HANDLE) + "\n"),
        *(" " + text_of(HANDLE), "-" + text_of(HANDLE)[1:], "_" + text_of(HANDLE)[1:], "\0" + text_of(HANDLE)[1:]),
        *("é" + text_of(HANDLE)[1:], "\ud800" + text_of(HANDLE)[1:], HANDLE.hex(), "=" * 88),
    ],
    ids=lambda handle: ascii(handle)[:24],
)
def test_what_is_no_handle_in_base64_is_refused(handle: object) -> None:
    error = refusal_with("handle", handle)
    assert (error.field, error.expected) == ("regions[1].handle", "64 bytes, a CUDA IPC handle, in base64")


@pytest.mark.parametrize(
    "byte_size",
    [0, -1, 2**63, 10**300, 1.0, float("nan"), "4096", True, None, [], {}],
    ids=lambda size: ascii(size)[:24],
)
def test_a_size_that_no_memory_has_is_refused(byte_size: object) -> None:
    assert refusal_with("byte_size", byte_size).field == "regions[1].byte_size"


@pytest.mark.parametrize(
    "uuid",
    [
        *("", UUID[:-1], UUID + "0", UUID + "\n", " " + UUID[1:], UUID.upper(), f"GPU-{UUID}", "g" * 32),
        *("١" * 32, None, 1, True, [UUID], {}, int("1" * 32)),  # noqa: RUF001  # a digit, but no hexadecimal one
    ],
    ids=lambda uuid: ascii(uuid)[:24],
)
def test_what_is_no_uuid_is_refused(uuid: object) -> None:
    error = refusal_with("device_uuid", uuid)
    assert (error.field, error.expected) == ("regions[1].device_uuid", "32 lowercase hexadecimal digits")


@pytest.mark.parametrize("index", [-1, 2**63, 0.0, "0", True, False, [], {}])
def test_what_is_no_index_of_a_region_is_refused(index: object) -> None:
    assert refusal_with("slot_region", index).field == "regions[1].slot_region"


@pytest.mark.parametrize("index", [1, 2, 3, 4, MAX_INT64], ids=["itself", "named", "later", "none", "the largest"])
def test_only_an_earlier_managed_region_fences_gpu_memory(index: int) -> None:
    later = SystemRegionClaim(f"{KEY}-2", 12288, TOKEN, slot=0)
    values = encoded(SYSTEM, CUDA, NAMED, later)
    values[1]["slot_region"] = index
    error = refusal(values)
    assert (error.field, error.found) == ("regions[1].slot_region", str(index))
    assert error.expected == "the index of an earlier region of kind 'system' or 'lent', or null"


@pytest.mark.parametrize("other", [NAMED, UNFENCED], ids=["named", "cuda"])
def test_an_earlier_region_of_another_kind_fences_nothing(other: RegionClaim) -> None:
    fenced = CudaRegionClaim(HANDLE[::-1], 4096, UUID, slot_region=0)
    assert refusal(encoded(other, fenced)).field == "regions[1].slot_region"


@pytest.mark.parametrize(
    "again",
    [CUDA, UNFENCED, CudaRegionClaim(HANDLE, 1, "0" * 32, slot_region=0)],
    ids=["the same", "without a slot", "with another size and GPU"],
)
def test_memory_that_is_named_twice_is_refused(again: CudaRegionClaim) -> None:
    assert refusal(encoded(SYSTEM, CUDA, again)).field == "regions[2].handle"


def test_memory_that_is_named_twice_in_other_letters_is_refused() -> None:
    values = encoded(UNFENCED, UNFENCED)
    assert values[1]["handle"].endswith("w==")
    values[1]["handle"] = values[1]["handle"][:-3] + "x=="  # the last bits before padding count for nothing
    assert refusal(values).field == "regions[1].handle"
