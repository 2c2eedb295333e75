"""Rings of frames: where each frame lies, how they are numbered, and what a descriptor may say of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shm_backend_utils.errors import DescriptorError
from shm_backend_utils.protocol import descriptor
from shm_backend_utils.protocol.descriptor import OutputSpan
from shm_backend_utils.protocol.ring import MOST_FRAMES, Ring, encode_ring, frame_number, parse_ring

RING = {"slot": 1, "frames": 4, "stride": 4096}
LARGEST = (1 << 63) - 1


def test_a_ring_comes_back_as_it_went() -> None:
    ring = Ring(3, 5, 256)
    assert parse_ring(json.loads(json.dumps(encode_ring(ring)))) == ring


def test_each_place_is_one_stride_behind_the_one_before() -> None:
    first = {"A": OutputSpan(0, 8192, 100), "B": OutputSpan(1, 0, 50)}
    assert Ring(1, 4, 1000).outputs(first, 0) == first
    assert Ring(1, 4, 1000).outputs(first, 3) == {"A": OutputSpan(0, 11192, 100), "B": OutputSpan(1, 3000, 50)}


def test_frames_are_numbered_from_one_in_each_generation() -> None:
    assert [frame_number(1, index) for index in range(3)] == [(1 << 32) + 1, (1 << 32) + 2, (1 << 32) + 3]


def test_no_frame_has_the_number_of_one_of_an_earlier_request() -> None:
    assert frame_number(6, 0) > frame_number(5, (1 << 32) - 2)
    assert frame_number(1, 0) > 0  # what is in a record that nobody has written to


@pytest.mark.parametrize(
    ("ring", "field"),
    [
        (None, "ring"),
        ([], "ring"),
        ("ring", "ring"),
        ({}, "ring"),
        ({"slot": 1, "frames": 4}, "ring"),
        ({**RING, "more": 1}, "ring"),
        ({**RING, "slot": -1}, "ring.slot"),
        ({**RING, "slot": 1.0}, "ring.slot"),
        ({**RING, "slot": True}, "ring.slot"),
        ({**RING, "slot": None}, "ring.slot"),
        ({**RING, "slot": LARGEST + 1}, "ring.slot"),
        ({**RING, "frames": 0}, "ring.frames"),
        ({**RING, "frames": -4}, "ring.frames"),
        ({**RING, "frames": MOST_FRAMES + 1}, "ring.frames"),
        ({**RING, "frames": "4"}, "ring.frames"),
        ({**RING, "stride": -1}, "ring.stride"),
        ({**RING, "stride": LARGEST + 1}, "ring.stride"),
        ({**RING, "stride": 10**1000}, "ring.stride"),
    ],
)
def test_what_is_no_ring_is_refused_and_its_field_named(ring: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as refusal:
        parse_ring(ring)
    assert refusal.value.field.startswith(field)
    assert len(str(refusal.value)) < 500


def described(ring: dict[str, int], **changes: Any) -> str:
    """Return a descriptor of a region of 64 KiB, with an input at 16 KiB and outputs from 20 KiB."""
    region = {"kind": "system", "key": "shmbu-1-0123456789abcdef", "byte_size": 65536, "token": "0" * 32, "slot": 0}
    whole = {
        "v": 1,
        "model": "frames",
        "regions": [region],
        "inputs": {"X": [0, 16384, 4096, "UINT8", [4096]]},
        "outputs": {"Y": [0, 20480, 1000], "Z": [0, 22528, 2000]},
        "ring": ring,
        **changes,
    }
    return json.dumps(whole)


def test_a_descriptor_with_a_ring_comes_back_as_it_went() -> None:
    found = descriptor.parse(described(RING))
    assert found.ring == Ring(1, 4, 4096)
    assert descriptor.parse(descriptor.encode(found)) == found


@pytest.mark.parametrize(
    ("ring", "field"),
    [
        ({**RING, "frames": 12}, "ring.stride"),  # the last place would end behind the region
        ({**RING, "stride": 16384}, "ring.stride"),
        ({**RING, "stride": LARGEST}, "ring.stride"),
        ({**RING, "stride": 0}, "outputs."),
        ({**RING, "stride": 999}, "outputs.Y"),
        ({**RING, "stride": 2048}, "outputs."),  # the second Y would be where the first Z is
    ],
    ids=str,
)
def test_places_that_do_not_fit_or_overlap_are_refused(ring: dict[str, int], field: str) -> None:
    with pytest.raises(DescriptorError) as refusal:
        descriptor.parse(described(ring))
    assert refusal.value.field.startswith(field)


def test_places_may_lie_close_to_one_another_and_end_with_the_region() -> None:
    found = descriptor.parse(described({"slot": 1, "frames": 11, "stride": 4096}, outputs={"Y": [0, 20480, 4096]}))
    assert found.ring is not None
    assert found.ring.outputs(found.outputs, 10)["Y"] == OutputSpan(0, 61440, 4096)


def test_a_later_place_over_an_input_is_refused() -> None:
    with pytest.raises(DescriptorError) as refusal:
        descriptor.parse(described(RING, inputs={"X": [0, 32768, 4096, "UINT8", [4096]]}))
    assert refusal.value.field.startswith("outputs.")


def test_a_ring_of_one_place_needs_no_stride() -> None:
    assert descriptor.parse(described({"slot": 1, "frames": 1, "stride": 0})).ring == Ring(1, 1, 0)


def test_a_ring_without_a_managed_region_is_refused() -> None:
    named = [{"kind": "named", "name": "foreign"}]
    with pytest.raises(DescriptorError) as refusal:
        descriptor.parse(described(RING, regions=named))
    assert refusal.value.field == "ring"
