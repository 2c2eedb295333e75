"""What `model.py` learns of a request beside its tensors: id, sequence, deadline, cancellation, and which instance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PreparedCall, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from tests.releases import names_sequences

from .eventually import eventually
from .flavours import AnyClient

X = np.ones(3, np.float32)
ROOM = {"FACTS": 2048}


def facts_of(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result["FACTS"].tobytes())
    return told


def facts(client: AnyClient, **options: Any) -> dict[str, Any]:
    with client.infer("call_facts", {"X": X}, outputs=ROOM, **options) as result:
        return facts_of(result)


def test_the_request_id(any_client: AnyClient, path: PathName) -> None:
    assert facts(any_client, request_id="größer 7", path=path)["request_id"] == "größer 7"
    assert facts(any_client, path=path)["request_id"] == ""


NAMED: Final = pytest.param("order 66", marks=names_sequences)


@pytest.mark.parametrize("sequence_id", [7, (1 << 63) - 1, NAMED])
@pytest.mark.parametrize(("is_start", "is_end"), [(True, False), (False, False), (False, True), (True, True)])
def test_the_part_of_a_sequence(any_client: AnyClient, sequence_id: int | str, is_start: bool, is_end: bool) -> None:
    told = facts(any_client, sequence_id=sequence_id, sequence_start=is_start, sequence_end=is_end)
    assert told["sequence"] == [sequence_id, is_start, is_end]


def test_a_request_of_no_sequence(any_client: AnyClient, path: PathName) -> None:
    assert facts(any_client, path=path)["sequence"] is None


def test_the_deadline(any_client: AnyClient, path: PathName) -> None:
    left_s = facts(any_client, timeout=60_000_000, path=path)["left_s"]
    assert 0 < left_s <= 60
    assert facts(any_client, path=path)["left_s"] is None


def test_a_client_that_waits_has_not_cancelled(any_client: AnyClient) -> None:
    assert facts(any_client)["cancelled"] is False


@pytest.mark.parametrize("path", ["direct", "inline"])
def test_a_client_that_does_not_want_the_answer_any_more(
    triton_server: EmbeddedServer, tmp_path: Path, path: PathName
) -> None:
    note = tmp_path / "note"

    async def ask_and_cancel() -> None:
        async with AsyncShmClient(triton_server.grpc_url) as client:
            asked = client.infer("call_facts", {"X": X}, outputs=ROOM, parameters={"note": str(note)}, path=path)
            task = asyncio.ensure_future(asked)
            while not note.exists() or note.read_text() != "waiting":
                await asyncio.sleep(0.001)
            task.cancel()
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
            while client.stats().slots_held or client.stats().quarantined:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(ask_and_cancel(), 20))
    eventually(lambda: note.read_text() == "cancelled")


@pytest.fixture
def two_calls(triton_server: EmbeddedServer) -> Iterator[list[PreparedCall]]:
    with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
        calls = [
            client.prepare("call_facts", {"X": ((3,), np.float32)}, outputs=ROOM, parameters={"wait": True})
            for _ in range(2)
        ]
        yield calls
        for call in calls:
            call.close()


def test_two_instances_serve_at_the_same_time_each_in_a_process_of_its_own(two_calls: list[PreparedCall]) -> None:
    for call in two_calls:
        call.inputs["X"][:] = 0
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(call.infer) for call in two_calls]
        try:
            eventually(lambda: all(call._call.exchange._slot.is_started for call in two_calls))  # type: ignore[attr-defined]
        finally:
            for call in two_calls:
                call.inputs["X"][:] = 1
    told = [facts_of(future.result()) for future in futures]
    assert told[0]["pid"] != told[1]["pid"]
    assert {each["name"] for each in told} == {"call_facts_0_0", "call_facts_0_1"}
    assert {each["kind"] for each in told} == {"CPU"}
