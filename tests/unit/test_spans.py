"""Rings of frames: where each frame lies, and how they are numbered."""

from __future__ import annotations

from shm_backend_utils.protocol.spans import MAX_FRAMED_GENERATION, OutputSpan, Ring, brief, frame_number


def test_each_place_is_one_stride_behind_the_one_before() -> None:
    first = {"A": OutputSpan(0, 8192, 100), "B": OutputSpan(1, 0, 50)}
    assert Ring(1, 4, 1000).outputs(first, 0) == first
    assert Ring(1, 4, 1000).outputs(first, 3) == {"A": OutputSpan(0, 11192, 100), "B": OutputSpan(1, 3000, 50)}


def test_frames_are_numbered_from_one_in_each_generation() -> None:
    assert [frame_number(1, index) for index in range(3)] == [(1 << 32) + 1, (1 << 32) + 2, (1 << 32) + 3]


def test_no_frame_has_the_number_of_one_of_an_earlier_request() -> None:
    assert frame_number(6, 0) > frame_number(5, (1 << 32) - 2)
    assert frame_number(1, 0) > 0  # what is in a record that nobody has written to


def test_the_last_number_of_the_last_generation_has_64_bits() -> None:
    assert frame_number(MAX_FRAMED_GENERATION, (1 << 32) - 2) == 2**64 - 1


def test_text_of_a_peer_is_cut_and_escaped_in_messages() -> None:
    assert brief("x" * 64) == "x" * 64
    assert brief("x" * 65) == "x" * 61 + "..."
    assert brief("é\n\x1b\ud800") == r"é\n\x1b\ud800"
