"""Rings of frames, written by hand: what is right is used, and what lies is refused."""

from __future__ import annotations

import os
import queue
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.protocol.spans import MAX_FRAMES
from shm_backend_utils.server import EmbeddedServer

from .hand_made import STEP, Claim, HandMade, hand_made

X: Final = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture
def by_hand(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A valid request with a ring of four frames."""
    with hand_made(triton_server.grpc_url, "frames_of", {"X": X}, {"Y": X.nbytes}, slot_count=5) as request:
        request.table.frame_count, request.table.frame_slot, request.table.frame_stride = 4, 1, STEP
        yield request


def last_error(request: HandMade) -> str:
    """Send it, and return its error; empty if its stream ends well."""
    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    request.stream(lambda result, error: answers.put((result, error)))
    while True:
        result, error = answers.get(timeout=20)
        if error is not None:
            return str(error.message())
        if result.get_response().parameters["triton_final_response"].bool_param:
            return ""


def test_a_ring_made_by_hand_works_as_long_as_nothing_breaks_it(by_hand: HandMade) -> None:
    by_hand.parameters.update(count=3)
    assert last_error(by_hand) == ""
    begin, byte_size = by_hand.table["Y"].offset, by_hand.table["Y"].byte_size
    frames = [by_hand.array(begin + place * STEP, byte_size, np.float32).tolist() for place in range(3)]
    assert frames == [(X + index).tolist() for index in range(3)]
    assert [by_hand.region.record(slot).completed for slot in range(1, 5)] == [(5 << 32) + n for n in (1, 2, 3)] + [0]
    assert by_hand.region.record(0).completed == 5


@pytest.mark.parametrize(
    ("ring", "field"),
    [
        ({"frame_slot": 2}, "frame_slot"),
        ({"frame_slot": 0}, "frame_slot"),
        ({"frame_count": MAX_FRAMES + 1}, "frame_count"),
        ({"frame_stride": (1 << 63) - 1}, "frame_stride"),
        ({"frame_stride": X.nbytes - 1}, "frame_stride"),
    ],
    ids=str,
)
def test_a_hostile_ring_is_refused_and_its_field_named(by_hand: HandMade, ring: dict[str, Any], field: str) -> None:
    for name, value in ring.items():
        setattr(by_hand.table, name, value)
    by_hand.parameters.update(count=3)
    before = by_hand.content()
    assert last_error(by_hand).startswith(f"shm:table: {field}")
    assert by_hand.content() == before


def test_a_ring_that_leaves_a_registered_region_is_refused(by_hand: HandMade) -> None:
    """How large it is the model alone knows; behind what is registered, the object goes on."""
    path = Path("/dev/shm") / f"foreign-{os.getpid()}-{secrets.token_hex(4)}"
    path.write_bytes(bytes(8 * STEP))
    client = by_hand.client(by_hand.url)
    client.register_system_shared_memory(path.name, path.name, 3 * STEP)
    try:
        by_hand.table.regions = [Claim(3, path.name.encode())]
        by_hand.table["Y"].region, by_hand.table["Y"].offset = 1, 0
        by_hand.parameters.update(count=4)
        assert last_error(by_hand).startswith("shm:table: outputs.Y: found 12304 bytes at offset 0")
        assert not any(path.read_bytes())
        client.stop_stream()
        by_hand.table.frame_count = 3
        by_hand.parameters.update(count=3)
        by_hand.next()
        assert last_error(by_hand) == ""
        frames = [np.frombuffer(path.read_bytes(), np.float32, 4, place * STEP).tolist() for place in range(3)]
        assert frames == [(X + index).tolist() for index in range(3)]
    finally:
        unregister_when_free(lambda: client.unregister_system_shared_memory(path.name))
        path.unlink()


def test_a_client_that_gives_back_what_it_has_not_got_breaks_its_own_frames_alone(by_hand: HandMade) -> None:
    for slot in range(1, 5):
        by_hand.region.record(slot).generation = (1 << 63) - 1
    by_hand.parameters.update(count=20)
    assert last_error(by_hand) == ""
    the_next_stream_is_served(by_hand.url)


def the_next_stream_is_served(url: str) -> None:
    with ShmClient(url, timeout_s=20) as client:
        results = client.stream("frames_of", {"X": X}, outputs={"Y": X.nbytes}, parameters={"count": 3})
        assert [result.copy()["Y"].tolist() for result in results] == [(X + index).tolist() for index in range(3)]
