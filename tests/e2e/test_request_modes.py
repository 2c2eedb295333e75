"""What a call knows beside its tensors, and requests that are served at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import AsyncShmClient, PreparedCall, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.dtypes import BF16
from shm_backend_utils.server import EmbeddedServer
from tests.releases import carries_bf16, names_sequences

from .eventually import eventually
from .flavours import AnyClient

MODEL = "request_modes"
GO = {"GO": np.ones(1, np.int64)}


def facts(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(bytes(result["FACTS"]))
    return told


def test_a_call_that_says_nothing_of_itself(any_client: AnyClient, path: PathName) -> None:
    told = facts(any_client.infer(MODEL, GO, path=path))
    assert (told["request_id"], told["sequence"], told["left_s"], told["cancelled"]) == ("", None, None, False)


def test_a_call_knows_its_request_id(any_client: AnyClient, path: PathName) -> None:
    assert facts(any_client.infer(MODEL, GO, path=path, request_id="Ω 7"))["request_id"] == "Ω 7"


@pytest.mark.parametrize(("start", "end"), [(True, False), (False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "correlation_id",
    [
        7,
        pytest.param("seven", marks=names_sequences),
    ],
)
def test_a_call_knows_its_place_in_a_sequence(
    client: ShmClient, path: PathName, correlation_id: int | str, start: bool, end: bool
) -> None:
    result = client.infer(MODEL, GO, path=path, sequence_id=correlation_id, sequence_start=start, sequence_end=end)
    assert facts(result)["sequence"] == [correlation_id, start, end]


def test_a_call_knows_when_its_time_is_over(any_client: AnyClient, path: PathName) -> None:
    left_s = facts(any_client.infer(MODEL, GO, path=path, timeout=2_000_000))["left_s"]
    assert left_s == pytest.approx(2, abs=0.5)


def test_two_instances_work_at_once(client: ShmClient) -> None:
    with warm(client) as (one, begun_one), warm(client) as (two, begun_two):
        threads = [threading.Thread(target=lambda call=call: call.infer().release()) for call in (one, two)]
        for thread in threads:
            thread.start()
        eventually(lambda: begun_one[0] == 1 == begun_two[0])
        for call in (one, two):
            call.inputs["GO"][:] = 1
        for thread in threads:
            thread.join()


@contextmanager
def warm(client: ShmClient) -> Iterator[tuple[PreparedCall, npt.NDArray[Any]]]:
    """A call that will not end, and where it will say that it has begun."""
    with client.prepare(MODEL, {"GO": ((1,), np.int64)}) as call:
        call.inputs["GO"][:] = 1
        begun = call.infer()["BEGUN"]  # a view: the next answer will appear here
        call.inputs["GO"][:] = begun[:] = 0
        yield call, begun


def test_a_model_sees_that_nobody_wants_the_answer(triton_server: EmbeddedServer) -> None:
    async def cancel() -> None:
        async with AsyncShmClient(triton_server.grpc_url, timeout_s=30) as client:
            with await client.prepare(MODEL, {"GO": ((1,), np.int64)}) as call:
                call.inputs["GO"][:] = 1
                begun = (await call.infer())["BEGUN"]
                call.inputs["GO"][:] = begun[:] = 0
                task = asyncio.ensure_future(call.infer())
                while begun[0] == 0:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            del begun
            while client.stats().slots_held or client.stats().quarantined:  # as long as the model waits
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancel(), 15))


def test_requests_are_served_side_by_side_by_an_execute_that_is_a_coroutine(client: ShmClient, path: PathName) -> None:
    calls = [client.submit("side_by_side", {"X": np.array([[x]], np.float32)}, path=path) for x in (1, 2)]
    assert [call.result()["OTHER"].item() for call in calls] == [2, 1]


@carries_bf16
def test_brain_floats_are_added_up(any_client: AnyClient, path: PathName) -> None:
    halves = np.array([0.5, -1.5, 300], BF16.numpy)
    with any_client.infer("brain_floats", {"X": halves}, path=path) as result:
        assert result["Y"].astype(np.float32).tolist() == [1, -3, 600]
