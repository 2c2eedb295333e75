"""Further regions of a table, and results, byte by byte as they are drawn: a peer wrote them, and may be hostile."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import PeerError, TableError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.claims import (
    MAX_REGIONS,
    CudaDescriptorClaim,
    CudaRegionClaim,
    LentRegionClaim,
    NamedRegionClaim,
    RegionClaim,
    decode_claims,
    encode_claim,
)
from shm_backend_utils.protocol.results import OutputPlace, Results
from shm_backend_utils.protocol.spans import MAX_TENSORS

KEY = "shmbu-4711-5ec7e75ec7e7"
TOKEN = "0123456789abcdef" * 2
UUID = "fedcba9876543210" * 2
HANDLE = bytes(range(64))
LENT = LentRegionClaim(KEY, 12288, TOKEN, 2)
CUDA = CudaRegionClaim(HANDLE, 4096, UUID, 0)
WAITING = CudaRegionClaim(bytes(64), 4096, UUID, 0, True)
FOR_ONE_REQUEST = CudaRegionClaim(HANDLE[1:] + b"x", 4096, UUID, 0, False, True)
BY_DESCRIPTOR = CudaDescriptorClaim(KEY, 4096, TOKEN, UUID, 0, True)
UNFENCED = CudaRegionClaim(HANDLE[::-1], 2**63 - 1, UUID, None)
NAMED = NamedRegionClaim("weights é")
NO_FENCE = 0xFFFF
NAMES = {1: KEY.encode(), 2: HANDLE, 4: bytes.fromhex(UUID) + KEY.encode()}


def claim(
    kind: int, name: bytes, *, slot: int = 0, fence: int = NO_FENCE, size: int = 1, flags: int = 0, length: int = -1
) -> bytes:
    length = len(name) if length < 0 else length
    head = struct.pack("<BBHHHQ", kind, flags, slot, fence, length, size)
    return head + bytes.fromhex(TOKEN) + name.ljust(-(-len(name) // 8) * 8, b"\0")


def encoded(*claims: RegionClaim) -> bytes:
    return b"".join([encode_claim(claim) for claim in claims])


def decoded_claims(data: bytes, count: int = 1) -> tuple[RegionClaim, ...]:
    claims, end = decode_claims(data, 0, len(data), count)
    assert end == len(data)
    return claims


def refusal(data: bytes, count: int = 1) -> TableError:
    """Return the error that refuses these regions, once it is known to hold no secret."""
    with pytest.raises(TableError) as caught:
        decoded_claims(data, count)
    message = str(caught.value)
    assert len(message) < 300
    for secret in (KEY, TOKEN, UUID, HANDLE.hex(), repr(HANDLE)):
        assert secret not in message
    return caught.value


def test_regions_lie_byte_by_byte_as_they_are_drawn() -> None:
    assert encode_claim(LENT) == claim(1, KEY.encode(), slot=2, size=12288)
    assert encode_claim(CUDA) == claim(2, HANDLE, fence=0, size=4096).replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    waiting = claim(2, bytes(64), slot=1, fence=0, size=4096)
    assert encode_claim(WAITING) == waiting.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    lent = claim(2, FOR_ONE_REQUEST.handle, flags=1, fence=0, size=4096)
    assert encode_claim(FOR_ONE_REQUEST) == lent.replace(bytes.fromhex(TOKEN), bytes.fromhex(UUID))
    assert encode_claim(BY_DESCRIPTOR) == claim(4, NAMES[4], slot=1, fence=0, size=4096)
    assert encode_claim(NAMED) == claim(3, NAMED.name.encode(), size=0).replace(bytes.fromhex(TOKEN), bytes(16))


@pytest.mark.parametrize("given", [WAITING, BY_DESCRIPTOR])
def test_a_client_waits_only_if_it_says_so(given: Any) -> None:
    for each in (given, replace(given, waits=False)):
        assert decoded_claims(encode_claim(each)) == (each,)


def test_there_may_be_64_regions_and_no_more_and_handles_of_older_clients_events() -> None:
    regions = [NamedRegionClaim(str(number)) for number in range(MAX_REGIONS + 1)]
    data = encoded(*regions)
    assert len(decoded_claims(data[:-40], MAX_REGIONS)) == MAX_REGIONS
    assert refusal(data, MAX_REGIONS + 1).field == "region_count"
    older = claim(2, HANDLE + bytes(64), fence=0, size=4096)
    assert decoded_claims(older) == (replace(CUDA, device_uuid=TOKEN),)


REFUSED = [
    *((claim(kind, b"x"), "kind") for kind in (0, 5, 255)),
    *((claim(kind, name, size=size), "byte_size") for kind, name in NAMES.items() for size in (0, 2**63, 2**64 - 1)),
    *((claim(1, key), "name") for key in (b"shmbu-", b"weights", b"shmbu-a/b", b"shmbu-../x", b"shmbu-" + b"a" * 65)),
    *((claim(kind, name), "name") for kind in (1, 3) for name in (b"", b"\xff", b"a\0b", b"\xed\xa0\x80")),
    *((claim(2, bytes(length)), "name_length") for length in (0, 1, 63, 65, 127, 129, 192)),
    (claim(3, b"weights", length=65535), "name_length"),
    *((claim(2, HANDLE, fence=fence), "fence") for fence in (1, 4, NO_FENCE - 1)),
    (claim(2, HANDLE, flags=1), "fence"),
    *((claim(2, HANDLE, fence=0, flags=flags), "flags") for flags in (2, 3, 255)),
    *((claim(kind, name, flags=1), "flags") for kind, name in ((1, KEY.encode()), (3, b"weights"))),
    (claim(4, NAMES[4], fence=0, flags=1), "flags"),
    (claim(4, NAMES[4]), "fence"),
    (claim(4, NAMES[4], fence=1), "fence"),
    *((claim(4, name, fence=0), "name") for name in (b"", bytes(15), bytes(16), bytes(16) + b"weights")),
]


@pytest.mark.parametrize(
    ("data", "count", "field"),
    [
        *((data, 1, f"regions[1].{field}") for data, field in REFUSED),
        (claim(2, HANDLE, fence=2) + encoded(NAMED, LENT), 3, "regions[1].fence"),
        (claim(2, HANDLE, fence=3) + encoded(NAMED, LENT), 3, "regions[1].fence"),
        (encode_claim(NAMED) + claim(2, HANDLE, fence=1), 2, "regions[2].fence"),
        (encode_claim(UNFENCED) + claim(2, HANDLE, fence=1), 2, "regions[2].fence"),
        (encoded(UNFENCED, LENT, LENT), 3, "regions[3]"),
        (encoded(LENT, LentRegionClaim(KEY, 4096, "0" * 32, 0)), 2, "regions[2]"),
        (encoded(CUDA, CudaRegionClaim(HANDLE, 4096, UUID, 0, True)), 2, "regions[2]"),
        (encoded(NAMED, NAMED), 2, "regions[2]"),
    ],
)
def test_a_region_that_cannot_be_or_contradicts_another_is_refused(data: bytes, count: int, field: str) -> None:
    assert refusal(data, count).field == field


@pytest.mark.parametrize("length", range(0, 56, 8))
def test_a_region_that_breaks_off_is_refused(length: int) -> None:
    assert refusal(encode_claim(LENT)[:length]).field.startswith("regions[1]")


FP32, BYTES = dtypes.BY_NAME["FP32"], dtypes.BYTES
REGION = 8192  # bytes
RECORD = 2048
Y = OutputPlace("Y", FP32, (2, 3), 0, 4096, 24, False)
LABELS = OutputPlace("LABELS", BYTES, (2,), 0, 0, 0, True)


def output(**changes: Any) -> bytes:
    fields = {"offset": 4096, "byte_size": 24, "region": 0, "number": 11, "shape": (2, 3), "name": b"Y", "flags": 0}
    offset, byte_size, region, number, shape, name, flags = list({**fields, **changes}.values())[:7]
    rank, name_length = changes.get("rank", len(shape)), changes.get("name_length", len(name))
    fixed: bytes = struct.pack("<QQHBBHH", offset, byte_size, region, number, rank, name_length, flags)
    packed: bytes = struct.pack(f"<{len(shape)}Q", *shape)
    return fixed + packed + bytes(name).ljust(-(-len(name) // 8) * 8, b"\0")


def record(*outputs: bytes, events: tuple[int, ...] = (), **changes: Any) -> bytes:
    packed: bytes = struct.pack(f"<{len(events)}H", *events)
    body = b"".join(outputs) + packed.ljust(-(-len(packed) // 8) * 8, b"\0")
    head = {"started": 7, "completed": 7, "length": 24 + len(body), "output_count": len(outputs)}
    head |= {"event_count": len(events), **changes}
    data: bytes = struct.pack("<QQIHH", *list(head.values())) + body
    return data.ljust(max(RECORD, len(data)), b"\0")


def decoded(data: bytes) -> Results:
    return results.decode(data, [REGION])


def broken(data: bytes) -> str:
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; install the same release") as e:
        decoded(data)
    assert len(str(e.value)) < 300
    return str(e.value)


@pytest.mark.parametrize(
    ("changes", "is_valid"),
    [
        ({"completed": 6}, True),  # a GPU still works
        ({}, True),
        ({"started": 6, "completed": 6}, False),
        ({"completed": 6, "events": ()}, False),
    ],
)
def test_results_with_events_need_only_be_started(changes: dict[str, Any], is_valid: bool) -> None:
    spec = ModelSpec.from_config({"name": "m", "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2, 3]}]})
    data = record(output(), **{"events": (1,), **changes})
    if is_valid:
        assert results.decode(data, [REGION] * 2, 0, spec, 7).events == (1,)
    else:
        with pytest.raises(PeerError, match="answered without having used the shared memory"):
            results.decode(data, [REGION] * 2, 0, spec, 7)


def test_results_are_read_in_full_and_written_as_they_are_drawn() -> None:
    labels = output(name=b"LABELS", number=13, shape=(2,), offset=0, byte_size=0, flags=1)
    whole = record(output(), labels, events=(3, 1))
    assert results.decode(whole, [REGION] * 4) == Results((Y, LABELS), (3, 1), 7)
    written = results.encode([Y, LABELS], [3, 1])
    assert written == whole[16 : 16 + len(written)]
    assert not any(whole[16 + len(written) :])
    assert struct.unpack_from("<I", written)[0] == 16 + len(written)
    further = record(output(region=1), output(name=b"Z", region=1))  # in the same place
    assert [place.region for place in results.decode(further, [0, REGION]).outputs] == [1, 1]


@pytest.mark.parametrize("events", [(0,), (2,), (65535,), (1, 1), (1, 0)])
def test_an_event_is_that_of_a_further_region_and_named_once(events: tuple[int, ...]) -> None:
    with pytest.raises(PeerError, match="break the protocol: events of regions .* but the request has 1"):
        results.decode(record(output(), events=events), [REGION] * 2)
    assert "but the request has 0" in broken(record(output(), events=events))


def test_a_call_may_have_no_outputs_and_those_it_has_are_its_own_and_there_once() -> None:
    assert decoded(record()) == Results((), (), 7)
    assert results.decode(record(started=9, completed=8), []).completed == 8
    assert not any(results.NO_RESULTS)
    assert len(results.NO_RESULTS) == 8
    assert decoded(record(length=0)) == Results((), (), 7)
    data = record(output(offset=4096))
    assert results.decode(data, [REGION], 4096).outputs
    with pytest.raises(PeerError, match="24 bytes at offset 4096 that are not the request's"):
        results.decode(data, [REGION], 4100)
    assert "the same output twice" in broken(record(output(), output()))
    assert "8192" in broken(record(output(), output(name=b"Z", offset=REGION))), "one that is broken spoils all"


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [((), 4, 0), ((1,), 4, REGION - 4), ((0,), 0, REGION), ((0, 5), 0, 0), ((REGION // 4,), REGION, 0)],
)
def test_an_output_may_lie_anywhere_in_the_region(shape: tuple[int, ...], byte_size: int, offset: int) -> None:
    (found,) = decoded(record(output(shape=shape, byte_size=byte_size, offset=offset))).outputs
    assert found == OutputPlace("Y", FP32, shape, 0, offset, byte_size, False)


@pytest.mark.parametrize(
    "changes",
    [
        *({"offset": REGION - 20}, {"offset": REGION}, {"offset": 2**64 - 4}, {"offset": 4098}, {"offset": 4097}),
        *({"byte_size": 0}, {"byte_size": 23}, {"byte_size": 2**64 - 1}, {"region": 1}, {"region": 65535}),
        *({"number": 0}, {"number": 15}, {"number": 255}, {"flags": 2}, {"flags": 3}, {"flags": 65535}),
        *({"shape": ()}, {"shape": (2,)}, {"shape": (2, 4)}, {"shape": (2**63, 2)}, {"shape": (1,) * 33}),
        *({"shape": (0, 2**62), "byte_size": 0}, {"shape": (2**62, 2**62, 0), "byte_size": 0}),
        *({"shape": (2**62, 4), "flags": 1}, {"shape": (7,), "number": 13}, {"rank": 255}, {"rank": 3}, {"rank": 1}),
        *({"name": b""}, {"name": b"\xff"}, {"name_length": 9}, {"name_length": 65535}, {"name_length": 0}),
        *({"length": 23}, {"length": 24}, {"length": 55}, {"length": 57}, {"length": RECORD}),
        *({"length": RECORD + 1}, {"length": 2**32 - 1}, {"output_count": 0}, {"output_count": 2}),
        *({"output_count": MAX_TENSORS + 1}, {"output_count": 65535}, {"event_count": 1}, {"event_count": 65535}),
    ],
    ids=str,
)
def test_results_that_are_not_as_the_protocol_says_are_the_peers_fault(changes: dict[str, Any]) -> None:
    of_all = {name: value for name, value in changes.items() if name in ("length", "output_count", "event_count")}
    broken(record(output(**{name: value for name, value in changes.items() if name not in of_all}), **of_all))


@pytest.mark.parametrize(("outputs", "events"), [(MAX_TENSORS + 1, 0), (1, MAX_REGIONS + 1)])
def test_there_are_as_many_outputs_and_events_as_may_be_and_no_more(outputs: int, events: int) -> None:
    def half(outputs: int, events: int) -> bytes:
        places = [
            OutputPlace(f"Y{number}", dtypes.BY_NAME["UINT8"], (1,), 0, number, 1, False) for number in range(outputs)
        ]
        return (bytes(16) + results.encode(places, range(1, events + 1))).ljust(1 << 17, b"\0")

    sizes = [REGION, *[0] * (MAX_REGIONS + 1)]
    found = results.decode(half(min(outputs, MAX_TENSORS), min(events, MAX_REGIONS)), sizes)
    assert (len(found.outputs), len(found.events)) == (min(outputs, MAX_TENSORS), min(events, MAX_REGIONS))
    with pytest.raises(PeerError, match=f"results break the protocol: {outputs} outputs and {events} events"):
        results.decode(half(outputs, events), sizes)
