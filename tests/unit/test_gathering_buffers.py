"""The buffers in which batches are gathered: used again, bounded, and nothing of one batch is seen in another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.modes.batch import BatchCall, Buffers
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, outputs_of
from tests.unit.sessions import session_of, tensor

MOST: Final = 8


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    inputs = [tensor("X", dims=[-1]), tensor("N", "INT64", dims=[-1]), tensor("SHM", "UINT8")]
    outputs = [tensor("Y", dims=[-1]), tensor("M", "INT64", dims=[-1])]
    with session_of(monkeypatch, inputs, outputs, max_batch_size=MOST) as session:
        yield session


def requests(rng: random.Random, count: int, most_columns: int) -> list[tuple[InferenceRequest, np.ndarray[Any, Any]]]:
    """Return plain requests, whose rows must be gathered, and what each has in X."""
    found = []
    for _ in range(count):
        shape = rng.randint(1, 3), rng.randint(1, most_columns)
        x = np.full(shape, rng.random(), np.float32)
        found.append((delivered({}, ["Y", "M"], {"X": x, "N": x.astype(np.int64)}), x))
    return found


def double(batch: BatchCall) -> None:
    x, n = batch.input("X"), batch.input("N")
    np.multiply(x.numpy(), 2, out=batch.output("Y", x.shape[1:], x.dtype).numpy())
    batch.output("M", n.shape[1:], n.dtype).numpy()[...] = n.numpy()


def kept(session: ShmSession) -> dict[str, int]:
    return {name: buffer.nbytes for name, (buffer, _) in session._buffers._buffers.items()}


def test_rows_that_a_batch_passes_on_are_not_overwritten_by_the_next_batch(session: ShmSession) -> None:
    given = [np.full((1, width), value, np.float32) for value, width in enumerate((4, 4, 5, 5))]
    responses = session.serve_batch(
        [delivered({}, ["Y"], {"X": x}) for x in given], lambda batch: batch.put("Y", batch.input("X"))
    )
    assert [outputs_of(response)["Y"].tolist() for response in responses] == [x.tolist() for x in given]


@pytest.mark.parametrize("most_columns", [5, 100])
def test_batches_without_end_get_their_own_rows_and_leave_a_buffer_for_each_tensor_of_each_batch_of_one_execute(
    session: ShmSession, most_columns: int
) -> None:
    rng, most_requests = random.Random(1), 5
    for _ in range(200):
        asked = requests(rng, rng.randint(2, most_requests), most_columns)
        responses = session.serve_batch([request for request, _ in asked], double)
        for (_, x), response in zip(asked, responses, strict=True):
            assert response.error() is None
            assert outputs_of(response)["Y"].tolist() == (2 * x).tolist()
    largest = 3 * most_requests * most_columns * 8
    assert len(kept(session)) <= 4 * most_requests
    assert max(kept(session).values()) <= largest + largest // 4


def test_a_buffer_is_used_again_by_what_fits_until_the_session_closes(session: ShmSession) -> None:
    same = [request for request, _ in requests(random.Random(1), 1, 50)] * 3
    session.serve_batch(same, double)
    before = [id(buffer) for buffer, _ in session._buffers._buffers.values()]
    for _ in range(20):
        session.serve_batch(same, double)
    assert before
    assert [id(buffer) for buffer, _ in session._buffers._buffers.values()] == before
    session.close()
    assert kept(session) == {}


def test_a_buffer_that_is_replaced_is_not_written_to_by_the_next(session: ShmSession) -> None:
    """Who keeps an array of a batch keeps its memory, although a larger one has taken its place."""
    buffers = Buffers(None)
    small, _ = buffers.get("0 input X", 8)
    small[:] = 1
    large, _ = buffers.get("0 input X", 4096)
    large[:] = 2
    assert set(small.tolist()) == {1}
