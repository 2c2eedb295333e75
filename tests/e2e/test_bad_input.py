"""What is wrong fails alone, is named, writes nothing, and tells no secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.server import EmbeddedServer

from .hand_made import FIRST_GENERATION, HandMade
from .hand_made import hand_made as made_for

ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A valid request, to be broken."""
    with made_for(triton_server.grpc_url, "batch_witness", {"X": ROW}, {"Y": 16, "REQUEST_COUNT": 4}) as request:
        yield request


def sent(request: HandMade) -> Any:
    return request.infer([request.carrier(1)])


def test_the_hand_made_request_works_as_long_as_nothing_breaks_it(hand_made: HandMade) -> None:
    sent(hand_made)
    np.testing.assert_array_equal(hand_made.output("Y", np.float32), ROW[0] + 1)
    assert hand_made.record.completed == FIRST_GENERATION


@pytest.mark.parametrize(
    ("generation", "status", "code"),
    [
        (4, "CANCELLED", "shm:stale"),
        (6, "CANCELLED", "shm:stale"),
        (2**63 - 1, "CANCELLED", "shm:stale"),
        (0, "INVALID_ARGUMENT", "shm:table"),
        (-5, "INVALID_ARGUMENT", "shm:table"),
        ("5", "INVALID_ARGUMENT", "shm:table"),
        (True, "INVALID_ARGUMENT", "shm:table"),
    ],
    ids=["stale", "future", "largest", "zero", "negative", "string", "boolean"],
)
def test_a_generation_that_is_not_the_slots_is_refused(
    hand_made: HandMade, generation: object, status: str, code: str
) -> None:
    hand_made.generation = generation
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match=f"^.*{code}: .*shm_generation") as refusal:
        sent(hand_made)
    assert refusal.value.status() == f"StatusCode.{status}"
    assert hand_made.content() == before


def test_a_request_without_a_generation_is_refused(hand_made: HandMade) -> None:
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:table: shm_generation: found no such number"):
        hand_made.client(hand_made.url).infer(
            "batch_witness", [hand_made.carrier(1)], parameters={"shm_slot": str(hand_made.address)}
        )
    assert hand_made.content() == before


def test_a_request_is_executed_once(hand_made: HandMade) -> None:
    sent(hand_made)
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:replayed: .*executed before") as refusal:
        sent(hand_made)
    assert refusal.value.status() == "StatusCode.ALREADY_EXISTS"
    assert hand_made.content() == before


def test_a_region_that_was_removed_is_gone_though_it_is_mapped(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.region.segment.unlink()
    hand_made.next()
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:gone: shm_slot") as refusal:
        sent(hand_made)
    assert refusal.value.status() == "StatusCode.NOT_FOUND"
    assert hand_made.region.segment.key not in refusal.value.message()
    assert hand_made.content() == before
