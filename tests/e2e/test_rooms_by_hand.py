"""Rooms beside a stream's ring, written by hand: what is right is used, and what lies is refused."""

from __future__ import annotations

import queue
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import results
from shm_backend_utils.server import EmbeddedServer

from .hand_made import FIRST_GENERATION, STEP, Claim, HandMade, Table, Tensor, hand_made

X = np.array([1, 2, 3, 4], np.float32)
PLACE = 1  # its first frame is the stream's second one
SINCE = (FIRST_GENERATION << 32) + 1  # the first one's number


@pytest.fixture
def other() -> Iterator[ManagedRegion]:
    """A further region of the same client."""
    region = ManagedRegion.create(4 * STEP, 1)
    yield region
    region.segment.unlink()
    region.close()


@pytest.fixture
def by_hand(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A stream of three responses, none of which has room in its ring of four places."""
    with hand_made(triton_server.grpc_url, "frames_of", {"X": X}, {"Y": 8}, slot_count=5) as request:
        request.table.frame_count, request.table.frame_slot, request.table.frame_stride = 4, 1, STEP
        request.parameters.update(count=3)
        yield request


@pytest.fixture
def table(other: ManagedRegion) -> Table:
    """Room for the frames of one place, as it should be said."""
    claim = Claim(1, other.segment.key.encode(), other.header.byte_size, other.header.token)
    return Table([], [Tensor(b"Y", other.data_offset, X.nbytes, region=1)], [claim])


def give(request: HandMade, table: Table, since: int = SINCE) -> None:
    record = request.region.record(1 + PLACE)
    packed = table.packed(0)
    record.request[8 : len(packed)] = packed[8:]
    record.request[-8:] = struct.pack("<Q", since)


def error_of(request: HandMade) -> str:
    """Send it, and return its error; empty if its stream ends well."""
    answers: queue.Queue[Any] = queue.Queue()
    request.stream(lambda result, error: answers.put((result, error)))
    while True:
        result, error = answers.get(timeout=20)
        if error is not None:
            return str(error.message())
        if result.get_response().parameters["triton_final_response"].bool_param:
            return ""


def regions_of_frames(request: HandMade, other: ManagedRegion) -> list[int | None]:
    """Return in which region each of the three frames lies; None for one that came through Triton."""
    sizes = [request.region.header.byte_size, other.header.byte_size]
    found = [results.decode(request.region.record(slot).copy_results(), sizes).outputs for slot in (1, 2, 3)]
    return [None if place.is_in_response else place.region for (place,) in found]


def test_a_frame_lies_where_its_place_says(by_hand: HandMade, other: ManagedRegion, table: Table) -> None:
    give(by_hand, table)
    assert error_of(by_hand) == ""
    assert regions_of_frames(by_hand, other) == [None, 1, None]
    lying = np.ndarray((4,), np.float32, other.bytes(), other.data_offset)
    assert lying.tolist() == (X + 1).tolist()


@pytest.mark.parametrize("since", [0, 1, SINCE + 1, SINCE - (1 << 32), SINCE + (1 << 32), (1 << 64) - 1])
def test_a_word_that_means_no_response_before_means_nothing(
    by_hand: HandMade, other: ManagedRegion, table: Table, since: int
) -> None:
    give(by_hand, table, since)
    assert error_of(by_hand) == ""
    assert regions_of_frames(by_hand, other) == [None] * 3


LIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "offset": ({}, {"offset": 0}, {}, "shm:table: frame.outputs.Y"),
    "size": ({}, {"byte_size": 1 << 40}, {}, "shm:table: frame.outputs"),
    "region": ({}, {"region": 0}, {}, "shm:table: frame.outputs.Y.region"),
    "name": ({}, {"name": b"X"}, {}, "shm:tensor: "),
    "no name": ({}, {"name": b"\xff"}, {}, "shm:table: frame.outputs[0].name"),
    "token": ({}, {}, {"secret": bytes(16)}, "shm:refused: "),
    "key": ({}, {}, {"name": b"shmbu-nothing"}, "shm:gone: "),
    "path": ({}, {}, {"name": b"../etc/passwd"}, "shm:table: frame.regions[1].name"),
    "region's size": ({}, {}, {"byte_size": 1 << 40}, "shm:table: frame.regions[1].byte_size"),
    "slot": ({}, {}, {"slot": 1}, "shm:table: frame.regions[1]"),
    "kind": ({}, {}, {"kind": 3}, "shm:table: frame.regions[1].kind"),
    "regions": ({"region_count": 64}, {}, {}, "shm:table: frame.regions[2]"),
    "too many": ({"output_count": 65535}, {}, {}, "shm:table: frame.input_count and output_count"),
    "length": ({"length": 1 << 31}, {}, {}, "shm:table: frame.length"),
    "frames": ({"frame_count": 1, "frame_slot": 1}, {}, {}, "shm:table: frame."),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_ends_its_stream_and_the_next_one_is_served(
    by_hand: HandMade, other: ManagedRegion, table: Table, lie: str
) -> None:
    of_table, of_tensor, of_claim, said = LIES[lie]
    for changed, changes in ((table, of_table), (table["Y"], of_tensor), (table.regions[0], of_claim)):
        for name, value in changes.items():
            setattr(changed, name, value)
    give(by_hand, table)
    before = other.bytes().copy()
    error = error_of(by_hand)
    assert error.startswith(said)
    assert other.segment.key not in error
    assert (other.bytes() == before).all()
    with ShmClient(by_hand.url, timeout_s=20) as client:
        results = client.stream("frames_of", {"X": X}, outputs={"Y": X.nbytes}, parameters={"count": 3})
        assert [result.copy()["Y"].tolist() for result in results] == [(X + index).tolist() for index in range(3)]
