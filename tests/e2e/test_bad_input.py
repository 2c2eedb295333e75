"""What is wrong fails alone, is named, writes nothing, and tells no secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ShmClient
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


def test_a_stale_generation_is_refused_where_the_slot_was_used_before(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.recorded = 7
    hand_made.generation = 6
    hand_made.write()
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="given this request up"):
        sent(hand_made)
    assert hand_made.content() == before


def test_a_request_is_executed_once(hand_made: HandMade) -> None:
    sent(hand_made)
    before = hand_made.content()
    with pytest.raises(InferenceServerException, match="shm:replayed: .*executed before") as refusal:
        sent(hand_made)
    assert refusal.value.status() == "StatusCode.ALREADY_EXISTS"
    assert hand_made.content() == before


def test_a_generation_below_one_that_was_executed_is_a_replay(hand_made: HandMade) -> None:
    sent(hand_made)
    hand_made.recorded = hand_made.generation = FIRST_GENERATION - 1
    with pytest.raises(InferenceServerException, match="shm:replayed: "):
        sent(hand_made)


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


def test_the_other_requests_of_a_batch_succeed(hand_made: HandMade, triton_server: EmbeddedServer) -> None:
    together = threading.Barrier(4)
    seen: list[int] = []
    refusals: list[str] = []

    def honest(row: int) -> None:
        with ShmClient(triton_server.grpc_url) as client:
            together.wait(timeout=30)
            with client.infer("batch_witness", {"X": np.full((1, 4), row, np.float32)}) as result:
                assert (result["Y"] == row + 1).all()
                seen.append(int(result["REQUEST_COUNT"][0, 0]))

    def lying() -> None:
        hand_made.address.token = "f" * 32
        together.wait(timeout=30)
        try:
            sent(hand_made)
        except InferenceServerException as error:
            refusals.append(error.message())

    threads = [threading.Thread(target=honest, args=(row,)) for row in range(3)] + [threading.Thread(target=lying)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 3
    assert max(seen) > 1
    assert len(refusals) == 1
