"""Results of a request, byte by byte as they are drawn. Any process may have written them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import PeerError
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.claims import MAX_REGIONS
from shm_backend_utils.protocol.results import OutputPlace, Results
from shm_backend_utils.protocol.spans import MAX_TENSORS

FP32, BYTES = dtypes.BY_NAME["FP32"], dtypes.BYTES
REGION = 8192
"""Bytes of the region that the outputs are in."""
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
    head = {
        "started": 7,
        "completed": 7,
        "length": 24 + len(body),
        "output_count": len(outputs),
        "event_count": len(events),
        **changes,
    }
    data: bytes = struct.pack("<QQIHH", *list(head.values())) + body
    return data.ljust(max(RECORD, len(data)), b"\0")


def decoded(data: bytes) -> Results:
    return results.decode(data, [REGION])


def broken(data: bytes) -> str:
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?") as e:
        decoded(data)
    assert len(str(e.value)) < 300
    return str(e.value)


def test_results_are_read_in_full() -> None:
    labels = output(name=b"LABELS", number=13, shape=(2,), offset=0, byte_size=0, flags=1)
    found = results.decode(record(output(), labels, events=(3, 1)), [REGION] * 4)
    assert found == Results((Y, LABELS), (3, 1), 7)
    further = record(output(region=1), output(name=b"Z", region=1))  # in the same place
    assert [place.region for place in results.decode(further, [0, REGION]).outputs] == [1, 1]


def test_results_are_written_as_they_are_drawn() -> None:
    labels = output(name=b"LABELS", number=13, shape=(2,), offset=0, byte_size=0, flags=1)
    written = results.encode([Y, LABELS], [3, 1])
    whole = record(output(), labels, events=(3, 1))
    assert written == whole[16 : 16 + len(written)]
    assert not any(whole[16 + len(written) :])
    assert struct.unpack_from("<I", written)[0] == 16 + len(written)


@pytest.mark.parametrize("events", [(0,), (2,), (65535,), (1, 1), (1, 0)])
def test_an_event_is_that_of_a_further_region_and_named_once(events: tuple[int, ...]) -> None:
    with pytest.raises(PeerError, match="break the protocol: events of regions .* of which 1 are there"):
        results.decode(record(output(), events=events), [REGION] * 2)
    assert "of which 0 are there" in broken(record(output(), events=events))


def test_a_call_may_have_no_outputs_and_a_failed_one_has_no_results() -> None:
    assert decoded(record()) == Results((), (), 7)
    assert results.decode(record(started=9, completed=8), []).completed == 8
    assert not any(results.NO_RESULTS)
    assert len(results.NO_RESULTS) == 8
    assert decoded(record(length=0)) == Results((), (), 7)


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [((), 4, 0), ((1,), 4, REGION - 4), ((0,), 0, REGION), ((0, 5), 0, 0), ((REGION // 4,), REGION, 0)],
    ids=["one number", "the last bytes", "nothing at the end", "nothing", "the whole region"],
)
def test_an_output_may_lie_anywhere_in_the_region(shape: tuple[int, ...], byte_size: int, offset: int) -> None:
    (found,) = decoded(record(output(shape=shape, byte_size=byte_size, offset=offset))).outputs
    assert found == OutputPlace("Y", FP32, shape, 0, offset, byte_size, False)


def test_an_output_before_the_memory_of_its_request_is_the_peers_fault() -> None:
    data = record(output(offset=4096))
    assert results.decode(data, [REGION], 4096).outputs
    with pytest.raises(PeerError, match="24 bytes at offset 4096 that are not the request's"):
        results.decode(data, [REGION], 4100)


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
    ],
    ids=str,
)
def test_an_output_that_is_not_as_the_protocol_says_is_the_peers_fault(changes: dict[str, Any]) -> None:
    broken(record(output(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"length": 23}, {"length": 24}, {"length": 55}, {"length": 57}, {"length": RECORD}),
        *({"length": RECORD + 1}, {"length": 2**32 - 1}, {"output_count": 0}, {"output_count": 2}),
        *({"output_count": MAX_TENSORS + 1}, {"output_count": 65535}, {"event_count": 1}, {"event_count": 65535}),
    ],
    ids=str,
)
def test_counts_and_lengths_that_are_wrong_are_the_peers_fault(changes: dict[str, int]) -> None:
    broken(record(output(), events=(), **changes))


def test_an_output_that_is_there_twice_is_the_peers_fault() -> None:
    assert "there twice" in broken(record(output(), output()))
    assert "8192" in broken(record(output(), output(name=b"Z", offset=REGION))), "one that is broken spoils all"


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


def test_results_that_break_off_are_the_peers_fault() -> None:
    whole = record(output())
    for length in range(24, 24 + len(output())):
        with pytest.raises(PeerError):
            decoded(whole[:length])
