"""How long what a call gave stays valid, and what that costs the pool; results that are fetched later, and streams."""

from __future__ import annotations

import concurrent.futures
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import AsyncShmClient, InferenceError, PoolExhaustedError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import CallerError, ClosedError, TensorError
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.eventually import all_memory_comes_back, eventually
from tests.e2e.flavours import AnyClient, Flavour

MODELS = ("countdown", "handshake", "identity", "repeat")
LENGTH = 75_000
ROOM = {"OUTPUT0": 4 * LENGTH}
ONE_CALL_ALONE = PoolOptions(max_bytes=1 << 20)  # a call has 300 kB in and 300 kB out


def infer(client: AnyClient, value: float, **named: Any) -> Result:
    return client.infer("identity", {"INPUT0": np.full(LENGTH, value, np.float32)}, outputs=ROOM, **named)


@pytest.fixture
def poor_client(flavour: Flavour) -> Iterator[AnyClient]:
    """A client whose memory is enough for one call at a time."""
    with flavour.client(pool=ONE_CALL_ALONE) as client:
        yield client


def test_leaving_the_block_releases_the_result(client: AnyClient, path: PathName) -> None:
    with infer(client, 1, path=path) as result:
        assert client.stats().slots_held == (path != "inline")
    all_memory_comes_back(client)
    with pytest.raises(ClosedError, match="this result is closed"):
        result.copy()


DERIVED: Final[list[Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]] = [
    lambda array: array,
    lambda array: array[5:9],
    lambda array: array.reshape(-1, 2).T,
    lambda array: array.view("u4"),
]


@pytest.mark.parametrize("derive", DERIVED, ids=["the array", "a slice", "another shape", "another dtype"])
def test_a_view_that_outlives_its_result_stays_as_it_is(client: AnyClient, path: PathName, derive: Any) -> None:
    with infer(client, 1, path=path) as result:
        view = derive(result["OUTPUT0"])
    before = view.copy()
    for value in (2, 3):
        infer(client, value, path=path).release()
    np.testing.assert_array_equal(view, before)


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_a_slot_is_used_again_when_the_last_view_is_gone(client: AnyClient, path: PathName) -> None:
    with infer(client, 1, path=path) as result:
        view = result["OUTPUT0"][:1]
        address = view.ctypes.data
    assert client.stats().slots_held == 1
    with infer(client, 2, path=path) as other:
        assert other["OUTPUT0"].ctypes.data != address
    del view, other
    all_memory_comes_back(client)
    assert client.stats().slots_idle == 2


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_a_call_without_memory_waits_until_a_view_is_gone(poor_client: AnyClient, path: PathName) -> None:
    held = [infer(poor_client, 1, path=path)["OUTPUT0"]]

    def let_go() -> None:
        eventually(lambda: poor_client.stats().slot_waits)
        held.clear()

    friend = threading.Thread(target=let_go)
    friend.start()
    with infer(poor_client, 2, path=path, timeout_s=20) as result:
        assert (result["OUTPUT0"] == 2).all()
    friend.join()
    assert poor_client.stats().slot_waits == 1


@pytest.mark.parametrize("is_aio", [False, True])
def test_error_and_warning_name_the_line_that_holds_the_memory(
    harness: ModelHarness, caplog: pytest.LogCaptureFixture, is_aio: bool
) -> None:
    inputs = {"INPUT0": np.ones(LENGTH, np.float32)}

    async def hold(client: AsyncShmClient) -> tuple[Result, int]:
        return await client.infer("identity", inputs, outputs=ROOM), this_line()

    with Flavour(harness, is_aio).client(pool=ONE_CALL_ALONE) as client:
        if isinstance(client, ShmClient):
            held, line = client.infer("identity", inputs, outputs=ROOM), this_line()
        else:
            held, line = client.run(hold(client.aio))
        with pytest.raises(PoolExhaustedError, match=f"1 by infer at {__file__}:{line}"):
            infer(client, 2, timeout_s=0.1)
        held.release()
    assert "the pool has run dry: 1 slots are held" in caplog.text
    assert f"1 by infer at {__file__}:{line}" in caplog.text


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_prepared_call_holds_memory_until_it_is_closed(poor_client: AnyClient) -> None:
    call = poor_client.prepare("identity", {"INPUT0": ((LENGTH,), np.float32)}, outputs=ROOM)
    with pytest.raises(PoolExhaustedError, match="1 by prepare at"):
        infer(poor_client, 2, timeout_s=0.1)
    call.close()
    infer(poor_client, 2).release()


def test_the_result_of_a_closed_prepared_call_stays_valid(client: AnyClient, path: PathName) -> None:
    with client.prepare("identity", {"INPUT0": ((LENGTH,), np.float32)}, path=path) as call:
        call.inputs["INPUT0"][:] = 1
        result = call.infer()
    infer(client, 2, path=path).release()
    assert (result["OUTPUT0"] == 1).all()


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


def test_what_cannot_be_streamed_is_an_error_before_anything_is_sent(client: AnyClient) -> None:
    with pytest.raises(CallerError, match="reserved"):
        list(countdown(client, priority=1))
    with pytest.raises(TensorError, match="model 'countdown' has no input 'Z'"):
        list(client.stream("countdown", {"Z": X}))


def test_a_stream_counts_as_one_request_and_of_a_model_that_is_not_decoupled_has_one_response(
    client: AnyClient,
) -> None:
    (result,) = client.stream("repeat", {"X": X}, outputs=["Y"], parameters={"times": 1})
    assert (list(result), result["Y"].tolist()) == (["Y"], X.tolist())
    list(countdown(client, count=5))
    assert client.stats().requests == 2
    with pytest.raises(InferenceError):
        list(countdown(client, count=5, fails_at=1))
    assert (client.stats().requests, client.stats().failures) == (3, 1)
