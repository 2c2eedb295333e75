"""Calls whose results are fetched later, and streams of responses."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import CallerError, ClosedError, TensorError
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient

MODELS = ("countdown", "handshake", "identity", "misbehaving", "repeat")
X: Final = np.array([1, 2, 3], np.float32)
WORKERS: Final = 32  # that send what was submitted


def test_inputs_may_be_overwritten_at_once(harness: ModelHarness, path: PathName) -> None:
    x = np.empty(1000, np.float32)
    with ShmClient(harness, inline_bytes=0) as client:
        futures = []
        for i in range(40):
            x[:] = i
            futures.append(client.submit("identity", {"INPUT0": x}, path=path))
        x[:] = -1
        for i, future in enumerate(futures):
            with future.result() as result:
                assert (result["OUTPUT0"] == i).all()


def test_what_the_model_raises_arrives_in_the_future(client: AnyClient, path: PathName) -> None:
    bad = client.submit("misbehaving", {"X": X}, parameters={"deed": "raise"}, path=path)
    good = client.submit("misbehaving", {"X": X}, parameters={"deed": "none"}, path=path)
    with pytest.raises(InferenceError, match="the model gave up"):
        bad.result()
    good.result().release()
    assert client.stats().failures == 1


def test_submit_waits_for_memory_that_earlier_calls_have(harness: ModelHarness) -> None:
    sums: queue.SimpleQueue[float] = queue.SimpleQueue()

    def add(future: concurrent.futures.Future[Result]) -> None:
        with future.result() as result:
            sums.put(float(result["OUTPUT0"].sum()))

    with ShmClient(harness, timeout_s=30, pool=PoolOptions(max_bytes=100_000)) as poor:
        for i in range(20):
            future = poor.submit("identity", {"INPUT0": np.full(5000, i, np.float32)})
            future.add_done_callback(add)
            del future  # which would hold the result
        assert sorted(sums.get(timeout=30) for _ in range(20)) == [5000.0 * i for i in range(20)]


def test_a_call_that_was_not_sent_yet_can_be_cancelled(harness: ModelHarness) -> None:
    with (
        ShmClient(harness, inline_bytes=0) as client,
        client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as blocker,
    ):
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
            futures = [client.submit("handshake", {"QUESTION": np.array([0, 1], np.int64)}) for _ in range(WORKERS + 8)]
            assert all(future.cancel() for future in futures[WORKERS + 1 :])
        finally:
            blocker.inputs["QUESTION"][1] = 1  # lets the model come to its end
            blocked.join()
        for future in futures[: WORKERS + 1]:
            future.result().release()
        with pytest.raises(concurrent.futures.CancelledError):
            futures[-1].result()
        blocker.close()
        all_memory_comes_back(client)


def test_closing_cancels_what_was_not_sent_yet(harness: ModelHarness) -> None:
    client = ShmClient(harness)
    futures = [client.submit("identity", {"INPUT0": X}) for _ in range(100)]
    client.close()
    for future in futures:  # each has an end, if not always a result
        error = None if future.cancelled() else future.exception(timeout=30)
        assert error is None or isinstance(error, Exception)
    with pytest.raises(ClosedError, match="this client is closed"):
        client.submit("identity", {"INPUT0": X})


def countdown(client: AnyClient, **parameters: Any) -> Iterator[Result]:
    return client.stream("countdown", {"X": X}, parameters=parameters, timeout_s=10)


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_responses_come_in_order(client: AnyClient, count: int) -> None:
    values = [result["Y"].tolist() for result in countdown(client, count=count)]
    assert values == [[1 + i, 2 + i, 3 + i] for i in range(count)]


def test_responses_come_one_by_one_and_stay_valid(client: AnyClient) -> None:
    results = countdown(client)
    first, second = next(results), next(results)
    assert first.path == "inline"
    assert (second["Y"] - first["Y"]).tolist() == [1, 1, 1]
    results.close()  # type: ignore[attr-defined]  # it is a generator


def test_letting_go_of_a_stream_ends_the_request(client: AnyClient) -> None:
    for result in countdown(client):
        assert (result["Y"] == X).all()
        break
    assert len(list(countdown(client, count=3))) == 3  # the model has one instance


def test_an_error_comes_after_the_responses_before_it(client: AnyClient) -> None:
    results = countdown(client, count=10, fails_at=2)
    assert [result["Y"][0] for result in itertools.islice(results, 2)] == [1, 2]
    with pytest.raises(InferenceError, match="the model gave up half way"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    assert len(list(countdown(client, count=3))) == 3


def test_a_response_that_does_not_come_is_an_error(client: AnyClient) -> None:
    results = client.stream("countdown", {"X": X}, parameters={"count": 9, "stalls_at": 1}, timeout_s=0.2)
    assert next(results)["Y"][0] == 1
    with pytest.raises(DeadlineExceededError):
        next(results)
    assert len(list(countdown(client, count=3))) == 3


def test_what_cannot_be_streamed_is_an_error_before_anything_is_sent(client: AnyClient) -> None:
    with pytest.raises(CallerError, match="reserved"):
        list(countdown(client, priority=1))
    with pytest.raises(TensorError, match="model 'countdown' has no input 'Z'"):
        list(client.stream("countdown", {"Z": X}))


def test_a_model_that_is_not_decoupled_streams_one_response(client: AnyClient) -> None:
    (result,) = client.stream("repeat", {"X": X}, outputs=["Y"], parameters={"times": 1})
    assert list(result) == ["Y"]
    assert result["Y"].tolist() == X.tolist()


def test_two_streams_do_not_mix(client: AnyClient) -> None:
    pairs = zip(client.stream("identity", {"INPUT0": X}), client.stream("identity", {"INPUT0": X + 1}), strict=True)
    assert [(a["OUTPUT0"][0], b["OUTPUT0"][0]) for a, b in pairs] == [(1, 2)]


def test_a_stream_counts_as_one_request(client: AnyClient) -> None:
    list(countdown(client, count=5))
    assert client.stats().requests == 1
    with pytest.raises(InferenceError):
        list(countdown(client, count=5, fails_at=1))
    assert (client.stats().requests, client.stats().failures) == (2, 1)


def test_infer_of_a_decoupled_model_is_an_error_that_says_so(client: AnyClient) -> None:
    with pytest.raises((CallerError, InferenceError), match="decoupled"):
        client.infer("countdown", {"X": X}, parameters={"count": 1})
    all_memory_comes_back(client)
