"""What objects show at a prompt: one line, before and after they are closed, and nothing that opens memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient, aio, client
from shm_backend_utils.compat.attach import CudaRegion
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from tests.unit.emulated import delivered
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import AsyncFakeTransport, FakeTransport
from tests.unit.sessions import session_of, tensor

X: Final = np.arange(6, dtype=np.float32)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """The server of every client here."""
    with FakeServer(config("m")) as server:
        monkeypatch.setattr(client, "connect", lambda *_: FakeTransport(server, "grpc"))
        monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, "grpc"))
        yield server


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


def test_a_forked_child_shows_that_the_client_is_its_parents() -> None:
    with ShmClient("localhost:8001") as made:
        made._core.is_forked = True  # type: ignore[union-attr]  # as in a child
        assert repr(made) == "<ShmClient 'grpc://localhost:8001' path=auto forked>"
        made._core.is_forked = False  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [ShmClient, AsyncShmClient, ShmSession])
def test_what_could_not_be_made_can_be_shown(kind: Any) -> None:
    assert "\n" not in repr(kind.__new__(kind))


@pytest.mark.parametrize("path", ["direct", "triton-shm", "inline"])
def test_a_prepared_call_shows_its_model_its_path_and_its_inputs(path: Any) -> None:
    with ShmClient("localhost:8001") as made:
        call = made.prepare("m", {"IN0": ((6,), np.float32)}, path=path)
        assert repr(call) == f"<PreparedCall 'm' path={path} 'IN0' FP32 [6], open>"
        call.close()
        assert repr(call) == f"<PreparedCall 'm' path={path} 'IN0' FP32 [6], closed>"


def test_a_result_shows_which_outputs_found_no_room(server: FakeServer) -> None:
    with ShmClient("localhost:8001") as made:
        first, second = made.infer("m", {"IN0": X}), made.infer("m", {"IN0": X})
        assert repr(first) == "<Result path=direct 'OUT0' float32 [6] overflowed=['OUT0']>"
        assert repr(second) == "<Result path=direct 'OUT0' float32 [6]>"
        second.release()
        assert repr(second) == "<Result path=direct released>"


def test_a_region_on_a_gpu_does_not_show_its_handle() -> None:
    region = CudaRegion(b"secret", 1, 4096)
    assert repr(region) == str(region) == "CudaRegion(device_id=1, byte_size=4096)"


def test_options_show_what_they_are_in_a_line() -> None:
    assert "max_bytes=4096" in repr(PoolOptions(max_bytes=4096))
    assert "\n" not in repr(PoolOptions())


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        yield session


def test_a_session_shows_its_model_and_whether_it_is_open(session: ShmSession) -> None:
    assert repr(session) == "<ShmSession 'm' open>"
    session.close()
    assert repr(session) == "<ShmSession 'm' closed>"


def test_a_call_shows_its_model_its_path_and_what_was_made(session: ShmSession) -> None:
    shown: list[str] = []

    def infer(call: Call) -> None:
        shown.append(repr(call))
        call.put("Y", call.input("X"))
        shown.append(repr(call))

    call = session.open(delivered({}, ["Y"], {"X": X}))
    assert repr(call) == "<Call 'm' path=triton outputs=[] closed>"
    with call:
        infer(call)
    assert shown == ["<Call 'm' path=triton outputs=[] open>", "<Call 'm' path=triton outputs=['Y'] open>"]
    assert repr(call) == "<Call 'm' path=triton outputs=['Y'] closed>"


@pytest.mark.parametrize("parameter", ["SHM_METRICS", "SHM_DEBUG"])
def test_a_call_has_one_name_whatever_the_session_adds(monkeypatch: pytest.MonkeyPatch, parameter: str) -> None:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters={parameter: "true"}) as session:
        assert repr(session.open(delivered())).startswith("<Call 'm' ")


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
