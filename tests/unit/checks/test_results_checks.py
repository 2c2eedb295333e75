"""Results of a peer that lies, one field at a time: nothing of them is believed."""

from __future__ import annotations

import struct

import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import PeerError
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.claims import MAX_REGIONS
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import MAX_TENSORS

UINT8 = BY_NAME["UINT8"]
HALF = 1 << 20
SIZES = [1 << 16, *[0] * (MAX_REGIONS + 1)]
LENGTH, COUNTS = 16, 20


def half(outputs: int = 1, events: int = 0) -> bytearray:
    """Return the model's half of a record, with honest results."""
    places = [OutputPlace(f"Y{number}", UINT8, (1,), 0, 8 * number, 1, False) for number in range(outputs)]
    encoded = results.encode(places, range(1, events + 1))
    data = bytearray(HALF)
    data[LENGTH : LENGTH + len(encoded)] = encoded
    return data


def length_of(data: bytes | bytearray) -> int:
    return int.from_bytes(data[LENGTH : LENGTH + 4], "little")


def refused(data: bytes | bytearray, match: str) -> None:
    with pytest.raises(PeerError, match=f"results break the protocol: {match}"):
        results.decode(bytes(data), SIZES)


@pytest.mark.parametrize("off", [-8, -1, 1, 8, 80])
def test_a_results_length_that_lies_is_found_out(off: int) -> None:
    data = half(2, 1)
    struct.pack_into("<I", data, LENGTH, length_of(data) + off)
    refused(data, f"{length_of(data) - off} bytes where their length says {length_of(data)}")


def test_a_results_length_beyond_the_record_is_found_out() -> None:
    data = half()
    struct.pack_into("<I", data, LENGTH, HALF + 1)
    refused(data, f"{HALF + 1} bytes where there is room for {HALF}")


def test_results_may_fill_the_record_to_its_end() -> None:
    data = half()
    assert len(results.decode(bytes(data[: length_of(data)]), SIZES).outputs) == 1


def test_as_many_outputs_and_events_as_there_may_be_are_read() -> None:
    found = results.decode(bytes(half(MAX_TENSORS, MAX_REGIONS)), SIZES)
    assert (len(found.outputs), len(found.events)) == (MAX_TENSORS, MAX_REGIONS)


@pytest.mark.parametrize(("outputs", "events"), [(MAX_TENSORS + 1, 0), (1, MAX_REGIONS + 1)])
def test_more_outputs_or_events_than_there_may_be_are_not_read(outputs: int, events: int) -> None:
    refused(half(outputs, events), f"{outputs} outputs and {events} events")


def test_results_that_end_in_the_middle_of_an_output_are_refused() -> None:
    data = half(3)
    refused(data[: length_of(data) - 20], f"{length_of(data)} bytes where there is room")
    struct.pack_into("<I", data, LENGTH, 48)
    refused(data[:64], "they end too early")


def test_an_output_one_byte_beyond_its_region_is_refused() -> None:
    encoded = results.encode([OutputPlace("Y", UINT8, (2,), 0, SIZES[0] - 1, 2, False)])
    refused(bytes(16) + encoded, "2 bytes at offset 65535 that are not the request's")
    inside = results.encode([OutputPlace("Y", UINT8, (2,), 0, SIZES[0] - 2, 2, False)])
    assert results.decode(bytes(16) + inside, SIZES).outputs[0].offset == SIZES[0] - 2
