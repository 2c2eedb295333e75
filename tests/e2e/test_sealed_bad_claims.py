"""Sealed regions that a request names beside its own, and clients that are other users: what is refused of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.server import EmbeddedServer
from tests.unit.fetching.scripted_desk import Script, ScriptedDesk, give, say_nothing

from .eventually import eventually
from .flavours import url_of
from .hand_made import Claim, HandMade, hand_made
from .sealed_by_hand import BYTE_SIZE, NAME, TOKEN, region
from .sealed_stub import SealedStub, stub_of

MODEL = "direct_only"
X = np.arange(16, dtype=np.float32)
PAGE = 4096


@pytest.fixture
def stub(triton_server: EmbeddedServer) -> SealedStub:
    return stub_of(triton_server, MODEL)


@pytest.fixture(params=["grpc", "http"])
def request_by_hand(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """An honest one in sealed memory."""
    url = url_of(triton_server, request.param)
    with hand_made(url, MODEL, {"X": X}, {"Y": X.nbytes}, kind=RegionKind.SEALED) as made:
        yield made


def is_honoured(made: HandMade) -> None:
    made.table.regions.clear()
    made.next()
    made.infer()
    assert made.results()["Y"].shape == X.shape


def is_honoured_again(made: HandMade) -> bool:
    """Return whether an honest request is honoured: who was silent before has used up the time of this user."""
    try:
        is_honoured(made)
    except InferenceServerException as error:
        if "have had the server wait for too long" not in str(error):
            raise
        return False
    return True


def test_a_region_that_is_lent_twice_is_refused(request_by_hand: HandMade) -> None:
    made = request_by_hand
    header = made.region.header
    made.table.regions.append(Claim(1, made.address.key.encode(), header.byte_size, header.token))
    with pytest.raises(InferenceServerException, match="memory that the request names before"):
        made.infer()
    is_honoured(made)


CLAIMS: dict[str, tuple[Callable[[], Script], int, str]] = {
    "a directory": (lambda: give(Descriptor(os.open, "/", os.O_RDONLY)), BYTE_SIZE, "shm:refused: .*is no memfd"),
    "two": (lambda: give(region(), region()), BYTE_SIZE, "shm:refused: .*more than one descriptor"),
    "none": (give, BYTE_SIZE, "shm:refused: .*says otherwise"),
    "silence": (lambda: say_nothing, BYTE_SIZE, "shm:refused: .*regions.1."),
    "smaller than claimed": (lambda: give(region()), BYTE_SIZE + PAGE, "shm:table: .*regions.1.*byte_size"),
    "with holes": (lambda: give(region(space=PAGE)), BYTE_SIZE, "shm:refused: .*holes"),
}


@pytest.mark.parametrize(("script", "byte_size", "complaint"), CLAIMS.values(), ids=list(CLAIMS))
def test_what_is_no_region_is_refused_beside_one(
    request_by_hand: HandMade, stub: SealedStub, script: Callable[[], Script], byte_size: int, complaint: str
) -> None:
    eventually(lambda: is_honoured_again(request_by_hand))
    before = stub.descriptors()
    with ScriptedDesk(script()) as desk:
        request_by_hand.table.regions.append(Claim(1, str(desk.key).encode(), byte_size, TOKEN))
        request_by_hand.next()
        with pytest.raises(InferenceServerException, match=complaint) as refused:
            request_by_hand.infer()
        assert str(desk.key) not in str(refused.value)
    is_honoured(request_by_hand)
    eventually(lambda: stub.descriptors() <= before and not stub.inodes(NAME))  # what is honest goes with a sweep
    assert stub.is_alive
