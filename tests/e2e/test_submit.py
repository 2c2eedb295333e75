"""Calls whose results are fetched later."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ClosedError, TensorError

from .eventually import all_memory_comes_back
from .flavours import AnyClient, LoopedClient

APART_S = 0.3  # before 24.12, Triton may crash if an answer comes just as its call is cancelled (its issue 7368)
WORKERS = 32  # that send what was submitted
QUESTION = {"QUESTION": ((2,), np.int64)}
ASKED_AND_ANSWERED = {"QUESTION": np.array([0, 1], np.int64)}  # the model does not wait for more


def test_every_future_gets_its_own_result(any_client: AnyClient, path: PathName) -> None:
    futures = [any_client.submit("identity", {"INPUT0": np.full(100, i, np.float32)}, path=path) for i in range(60)]
    for i, future in enumerate(futures):
        with future.result() as result:
            assert result.path == path
            assert (result["OUTPUT0"] == i).all()


def test_inputs_may_be_overwritten_at_once(client: ShmClient, path: PathName) -> None:
    x = np.empty(1000, np.float32)
    futures = []
    for i in range(40):
        x[:] = i
        futures.append(client.submit("identity", {"INPUT0": x}, path=path))
    x[:] = -1
    for i, future in enumerate(futures):
        with future.result() as result:
            assert (result["OUTPUT0"] == i).all()


def test_what_the_model_raises_arrives_in_the_future(any_client: AnyClient, path: PathName) -> None:
    x = np.ones(3, np.float32)
    bad = any_client.submit("misbehaving", {"X": x}, parameters={"deed": "raise"}, path=path)
    good = any_client.submit("misbehaving", {"X": x}, parameters={"deed": "none"}, path=path)
    with pytest.raises(InferenceError, match="the model gave up"):
        bad.result()
    good.result().release()
    assert any_client.stats().failures == 1


def test_what_is_wrong_with_the_inputs_is_an_error(any_client: AnyClient) -> None:
    with pytest.raises(TensorError, match="model 'identity' has no input 'INPUT1'"):
        any_client.submit("identity", {"INPUT1": np.ones(3, np.float32)}).result()


def test_submit_waits_for_memory_that_earlier_calls_have(url: str) -> None:
    sums: queue.SimpleQueue[float] = queue.SimpleQueue()

    def add(future: concurrent.futures.Future[Result]) -> None:
        with future.result() as result:
            sums.put(float(result["OUTPUT0"].sum()))

    with ShmClient(url, timeout_s=30, pool=PoolOptions(max_bytes=100_000)) as poor:
        for i in range(20):
            future = poor.submit("identity", {"INPUT0": np.full(5000, i, np.float32)})
            future.add_done_callback(add)
            del future  # which would hold the result
        assert sorted(sums.get(timeout=30) for _ in range(20)) == [5000.0 * i for i in range(20)]


def test_a_call_that_was_not_sent_yet_can_be_cancelled(client: ShmClient) -> None:
    with client.prepare("handshake", QUESTION) as blocker:
        blocker.inputs["QUESTION"][:] = [0, 1]
        answer = blocker.infer()["ANSWER"]
        answer[:] = 0
        blocker.inputs["QUESTION"][:] = [7, 0]
        blocked = threading.Thread(target=lambda: blocker.infer().release())
        blocked.start()
        while answer[0] == 0:  # until the model has it, others would go before it
            time.sleep(0.001)
        del answer
        try:
            futures = [client.submit("handshake", ASKED_AND_ANSWERED) for _ in range(WORKERS + 8)]
            assert all(future.cancel() for future in futures[WORKERS + 1 :])
        finally:
            blocker.inputs["QUESTION"][1] = 1  # lets the model come to its end
            blocked.join()
    for future in futures[: WORKERS + 1]:
        future.result().release()
    with pytest.raises(concurrent.futures.CancelledError):
        futures[-1].result()
    all_memory_comes_back(client)


@pytest.mark.parametrize("when", ["before it is sent", "while it runs"])
def test_a_task_can_be_cancelled(url: str, when: str) -> None:
    async def cancel(client: LoopedClient) -> None:
        aio = client.aio
        with await aio.prepare("handshake", QUESTION) as call:
            call.inputs["QUESTION"][:] = [0, 1]
            (await call.infer()).release()  # everything is warm
            question = call.inputs["QUESTION"]
            answer = (await call.infer())["ANSWER"]
            question[:] = answer[:] = 0
            task = asyncio.ensure_future(call.infer())
            if when == "while it runs":
                while answer[0] == 0:
                    await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(APART_S)
            question[1] = 1  # lets the model, if it runs, come to its end
        for i in range(20):
            with await aio.infer("handshake", {"QUESTION": np.array([i, 1])}) as result:
                assert result["ANSWER"].tolist() == [i + 1, 2]
        del question, answer
        while aio.stats().quarantined or aio.stats().slots_held:
            await asyncio.sleep(0.001)

    with LoopedClient(url, timeout_s=30) as client:
        client.run(asyncio.wait_for(cancel(client), 30))


def test_closing_cancels_what_was_not_sent_yet(url: str) -> None:
    client = ShmClient(url)
    futures = [client.submit("identity", {"INPUT0": np.ones(3, np.float32)}) for _ in range(100)]
    client.close()
    for future in futures:  # each has an end, if not always a result
        error = None if future.cancelled() else future.exception(timeout=30)
        assert error is None or isinstance(error, Exception)
    with pytest.raises(ClosedError, match="this client is closed"):
        client.submit("identity", {"INPUT0": np.ones(3, np.float32)})
