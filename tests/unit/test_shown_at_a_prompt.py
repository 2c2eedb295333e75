"""What objects show at a prompt, before and after they are closed, and what ``explain()`` and ``stats()`` tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient
from shm_backend_utils.client.explanation import Check, ClientStats, Explanation, Tally
from shm_backend_utils.compat.attach import CudaRegion
from shm_backend_utils.memory.pool.options import PoolStatus
from shm_backend_utils.model import BatchCall, ShmSession, StreamCall
from tests.unit.emulated import delivered
from tests.unit.sessions import session_of, tensor
from tests.unit.side_by_side import side_by_side

pytestmark = pytest.mark.usefixtures("server_of_every_client")
X: Final = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:8001", "grpc://localhost:8001"),
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://user:secret@host:8000/triton", "https://host:8000/triton"),
        ("http://host:8000/triton?token=secret", "http://host:8000/triton"),
        ("http://ho\nst:8000", "http://ho\\nst:8000"),
    ],
)
def test_a_client_shows_its_server_and_path_and_whether_it_is_open(url: str, shown: str) -> None:
    with ShmClient(url, path="direct") as made:
        assert repr(made) == f"<ShmClient '{shown}' path=direct open>"
    assert repr(made) == f"<ShmClient '{shown}' path=direct closed>"


def test_so_does_a_client_for_tasks() -> None:
    async def main() -> list[str]:
        made = AsyncShmClient("localhost:8001")
        shown = [repr(made)]
        async with made:
            shown.append(repr(made))
        return [*shown, repr(made)]

    begin = "<AsyncShmClient 'grpc://localhost:8001' path=auto"
    assert asyncio.run(main()) == [f"{begin} not connected yet>", f"{begin} open>", f"{begin} closed>"]


def test_what_could_not_be_made_and_what_holds_a_secret_can_be_shown() -> None:
    for kind in (ShmClient, AsyncShmClient, ShmSession):
        assert "\n" not in repr(kind.__new__(kind))
    region = CudaRegion(b"secret", 1, 4096)
    assert repr(region) == str(region) == "CudaRegion(device_id=1, byte_size=4096)"
    assert "max_bytes=4096" in repr(PoolOptions(max_bytes=4096))
    assert "\n" not in repr(PoolOptions())


def test_a_forked_child_shows_that_the_client_is_its_parents() -> None:
    with ShmClient("localhost:8001") as made:
        made._core.is_forked = True  # type: ignore[union-attr]  # as in a child
        assert repr(made) == "<ShmClient 'grpc://localhost:8001' path=auto forked>"
        made._core.is_forked = False  # type: ignore[union-attr]


def test_a_prepared_call_shows_its_inputs_and_a_result_which_outputs_found_no_room() -> None:
    with ShmClient("localhost:8001") as made:
        call = made.prepare("m", {"IN0": ((6,), np.float32)}, path="triton-shm")
        assert repr(call) == "<PreparedCall 'm' path=triton-shm 'IN0' FP32 [6], open>"
        call.close()
        assert repr(call) == "<PreparedCall 'm' path=triton-shm 'IN0' FP32 [6], closed>"
        first, second = made.infer("m", {"IN0": X}), made.infer("m", {"IN0": X})
        assert repr(first) == "<Result path=direct 'OUT0' float32 [6] overflowed=['OUT0']>"
        assert repr(second) == "<Result path=direct 'OUT0' float32 [6]>"
        second.release()
        assert repr(second) == "<Result path=direct released>"
        call = made.prepare("m", {"IN0": ((6,), np.float32)}, path="inline")
    assert repr(call) == "<PreparedCall 'm' path=inline 'IN0' FP32 [6], closed>"
    call.close()


def test_a_session_and_its_call_show_their_model_and_whether_they_are_open(session: ShmSession) -> None:
    assert repr(session) == "<ShmSession 'm' open>"
    call = session.open(delivered({}, ["Y"], {"X": X}))
    assert repr(call) == "<Call 'm' path=triton outputs=[] closed>"
    with call:
        assert repr(call) == "<Call 'm' path=triton outputs=[] open>"
        call.put("Y", call.input("X"))
        assert repr(call) == "<Call 'm' path=triton outputs=['Y'] open>"
    assert repr(call) == "<Call 'm' path=triton outputs=['Y'] closed>"
    session.close()
    assert repr(session) == "<ShmSession 'm' closed>"


def test_a_batch_shows_how_many_calls_and_rows_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[BatchCall] = []
    shown: list[str] = []

    def infer(batch: BatchCall) -> None:
        batches.append(batch)
        shown.append(repr(batch))
        batch.output("Y", (6,), np.float32).numpy()[:] = batch.input("X").numpy()

    carrier = {**tensor("SHM", "UINT8")}
    with session_of(monkeypatch, [tensor("X"), carrier], [tensor("Y")], max_batch_size=8) as session:
        session.serve_batch([delivered({}, ["Y"], {"X": X.reshape(1, 6)}) for _ in range(3)], infer)
    assert shown == ["<BatchCall 'm' calls=3 rows=3 open>"]
    assert repr(batches[0]) == "<BatchCall 'm' calls=3 rows=3 closed>"


def test_a_stream_shows_how_many_responses_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[StreamCall] = []
    shown: list[str] = []

    def answer(call: StreamCall) -> Iterator[None]:
        streams.append(call)
        for _ in range(2):
            shown.append(repr(call))
            call.put("Y", X)
            yield

    decoupled = {"decoupled": True}
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy=decoupled) as session:
        session.serve_streams([delivered({}, ["Y"], {"X": X})], answer)
    assert shown == ["<StreamCall 'm' path=triton sent=0 open>", "<StreamCall 'm' path=triton sent=1 open>"]
    assert repr(streams[0]) == "<StreamCall 'm' path=triton sent=2 closed>"


NASTY = "it says: <script>&\n\tno"
EXPLANATION = Explanation(
    "m<1>",
    "inline",
    NASTY,
    (
        Check("declares direct?", False, NASTY, ("direct",)),
        Check("a name that is longer than all of the others?", None, "nobody knows", ()),
        Check("here?", True, "yes", ()),
    ),
)
STATS = ClientStats(1234567, 1, 0, 2**30, {"direct": 1234, "inline": 3}, {"m": f"direct: {NASTY}"}, 0, 1, 2, 3, 4, 5)


def test_an_explanation_is_shown_as_a_table() -> None:
    assert repr(EXPLANATION).splitlines() == [
        "model 'm<1>' takes the path inline: it says: <script>& no",
        "  declares direct?                               no       it says: <script>& no",
        "  a name that is longer than all of the others?  unknown  nobody knows",
        "  here?                                          yes      yes",
    ]


def test_figures_are_shown_as_a_table() -> None:
    title, *lines = repr(STATS).splitlines()
    assert title == "what the client has done"
    assert "  requests        1,234,567" in lines
    assert "  bytes_avoided   1,073,741,824" in lines
    assert "  paths direct    1,234" in lines
    assert "  reasons m       direct: it says: <script>& no" in lines
    assert len({line.index(line.split()[-1]) for line in lines if "reasons" not in line}) == 1


POOL = PoolStatus(held=1, idle=2, quarantined=3, byte_size=4, max_bytes=5)


def stats(tally: Tally) -> ClientStats:
    return tally.stats({"resize": "direct: nothing prevents it"}, 6, POOL)


def test_calls_are_counted_by_their_path_with_the_bytes_that_did_not_cross_the_network() -> None:
    tally = Tally()
    before = stats(tally)
    for path in ("direct", "inline", "direct"):
        tally.succeeded(path, 10 if path == "direct" else 0)
    tally.retried()
    found = stats(tally)
    assert (found.requests, found.failures, found.retries, found.bytes_avoided) == (3, 0, 1, 20)
    assert found.paths == {"direct": 2, "inline": 1}
    assert (before.requests, before.failures, before.retries, before.bytes_avoided, before.paths) == (0, 0, 0, 0, {})
    assert found.reasons == {"resize": "direct: nothing prevents it"}
    assert (found.slots_held, found.slots_idle, found.quarantined) == (1, 2, 3)
    assert (found.pool_bytes, found.pool_max_bytes, found.slot_waits) == (4, 5, 6)


def test_threads_lose_no_count() -> None:
    tally = Tally()

    def work() -> None:
        for _ in range(1000):
            tally.succeeded("direct", 2)
            tally.retried()

    side_by_side(*[work] * 4)
    assert (stats(tally).requests, stats(tally).bytes_avoided, stats(tally).retries) == (4000, 8000, 4000)
