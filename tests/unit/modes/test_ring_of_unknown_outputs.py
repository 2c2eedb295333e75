"""A ring of outputs that the model does not have is refused before anything is made for its places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import StreamCall
from shm_backend_utils.protocol.layout import SlotRecord
from shm_backend_utils.protocol.spans import MAX_FRAMES, OutputSpan, Ring, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import answers_to, delivered, message_of
from tests.unit.modes.doubling import Open
from tests.unit.table_client import Client

MANY = 512
STRIDE = 64 * MANY


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=MAX_FRAMES + 1, share=STRIDE, record_byte_size=1 << 16)
    yield client
    client.close()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For which places outputs were laid out, or records looked up."""
    made: list[int] = []
    outputs, record = Ring.outputs, ManagedRegion.record

    def noting_outputs(ring: Ring, first: Mapping[str, OutputSpan], place: int) -> dict[str, OutputSpan]:
        made.append(place)
        return outputs(ring, first, place)

    def noting_record(region: ManagedRegion, slot: int) -> SlotRecord:
        if slot:
            made.append(slot - 1)
        return record(region, slot)

    monkeypatch.setattr(Ring, "outputs", noting_outputs)
    monkeypatch.setattr(ManagedRegion, "record", noting_record)
    return made


def ring_of(client: Client, *names: str) -> InferenceRequest:
    """Return the request of a stream with as many places as there may be, each with these outputs."""
    rooms = {name: OutputSpan(0, client.data + 64 * number, 16) for number, name in enumerate(names)}
    return delivered(client.begin(Table({}, rooms, ring=Ring(1, MAX_FRAMES, STRIDE))), list(names))


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_outputs_that_the_model_does_not_have_cost_nothing_for_each_place(
    open_session: Open, client: Client, places: list[int], is_first: bool
) -> None:
    unknown = [f"O{number}" for number in range(MANY - 1)]
    request = ring_of(client, *unknown, "Y") if is_first else ring_of(client, "Y", *unknown)
    executed: list[StreamCall] = []
    open_session(model_transaction_policy={"decoupled": True}).serve_streams([request], executed.append)
    (sent,) = answers_to(request).sent
    assert sent is not None
    assert message_of(sent) == "shm:tensor: model 'm' has no output 'O0'; it has Y"
    assert (places, executed) == ([], [])
    assert client.region.record(0).started == 0
    assert client.is_free()


def test_slots_that_are_not_there_are_refused_before_anything_is_made_for_them(
    open_session: Open, client: Client, places: list[int]
) -> None:
    rooms = {"Y": OutputSpan(0, client.data, 16)}
    request = delivered(client.begin(Table({}, rooms, ring=Ring(2, MAX_FRAMES, 64))), ["Y"])
    open_session(model_transaction_policy={"decoupled": True}).serve_streams([request], lambda _: None)
    (sent,) = answers_to(request).sent
    assert sent is not None
    assert message_of(sent).startswith("shm:table: frame_slot: found slots ")
    assert places == []


def test_outputs_that_the_model_has_are_laid_out_for_each_place(
    open_session: Open, client: Client, places: list[int]
) -> None:
    request = ring_of(client, "Y")

    def answer(call: StreamCall) -> Iterator[None]:
        call.put("Y", np.ones(4, np.float32))
        yield

    open_session(model_transaction_policy={"decoupled": True}).serve_streams([request], answer)
    (sent, last) = answers_to(request).sent
    assert sent is not None
    assert (sent.error(), last) == (None, None)
    assert set(places) == set(range(MAX_FRAMES))
