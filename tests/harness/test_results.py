"""How long what a call gave stays valid, and what that costs the pool."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import AsyncShmClient, BudgetError, PoolExhaustedError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient, Flavour, LoopedClient

MODELS = ("identity",)

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


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array,
        lambda array: array[5:9],
        lambda array: array.reshape(-1, 2).T,
        lambda array: array.view("u4"),
    ],
    ids=["the array", "a slice", "another shape", "another dtype"],
)
def test_a_view_that_outlives_its_result_stays_as_it_is(
    client: AnyClient, path: PathName, derive: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> None:
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
def test_a_call_without_memory_waits_until_a_view_is_gone(
    poor_client: AnyClient, path: PathName, caplog: pytest.LogCaptureFixture
) -> None:
    held = [infer(poor_client, 1, path=path)["OUTPUT0"]]
    ran_dry = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ran_dry.set()

    def let_go() -> None:
        ran_dry.wait(20)
        held.clear()

    watch = Watch(logging.WARNING)
    logger = logging.getLogger("shm_backend_utils")
    friend = threading.Thread(target=let_go)
    logger.addHandler(watch)
    friend.start()
    try:
        with infer(poor_client, 2, path=path, timeout_s=20) as result:
            assert (result["OUTPUT0"] == 2).all()
    finally:
        friend.join()
        logger.removeHandler(watch)
    assert poor_client.stats().slot_waits == 1


def test_error_and_warning_name_the_line_that_holds_the_memory(
    harness: ModelHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with ShmClient(harness, pool=ONE_CALL_ALONE) as client:
        held, line = client.infer("identity", {"INPUT0": np.ones(LENGTH, np.float32)}, outputs=ROOM), this_line()
        with pytest.raises(PoolExhaustedError, match=f"1 by infer at {__file__}:{line}"):
            infer(client, 2, timeout_s=0.1)
        held.release()
    assert "the pool has run dry: 1 slots are held" in caplog.text
    assert f"1 by infer at {__file__}:{line}" in caplog.text


def test_error_and_warning_name_the_line_of_a_coroutine(
    harness: ModelHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def hold(client: AsyncShmClient) -> tuple[Result, int]:
        x = np.ones(LENGTH, np.float32)
        return await client.infer("identity", {"INPUT0": x}, outputs=ROOM), this_line()

    with LoopedClient(harness, pool=ONE_CALL_ALONE) as client:
        held, line = client.run(hold(client.aio))
        with pytest.raises(PoolExhaustedError, match=f"1 by infer at {__file__}:{line}"):
            infer(client, 2, timeout_s=0.1)
        held.release()
    assert f"1 by infer at {__file__}:{line}" in caplog.text


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_call_that_never_fits_is_an_error_at_once(poor_client: AnyClient) -> None:
    with pytest.raises(BudgetError, match=r"the pool may have 1048576; raise PoolOptions\(max_bytes"):
        poor_client.prepare("identity", {"INPUT0": ((1 << 20,), np.float32)})


def test_inline_needs_no_memory_of_the_pool(poor_client: AnyClient) -> None:
    held = infer(poor_client, 1)
    with infer(poor_client, 2, path="inline") as result:
        assert (result["OUTPUT0"] == 2).all()
    held.release()


def test_a_prepared_call_holds_memory_until_it_is_closed(poor_client: AnyClient) -> None:
    call = poor_client.prepare("identity", {"INPUT0": ((LENGTH,), np.float32)}, outputs=ROOM)
    with pytest.raises(PoolExhaustedError, match="1 by prepare at"):
        infer(poor_client, 2, timeout_s=0.1)
    call.close()
    call.close()
    infer(poor_client, 2).release()
    with pytest.raises(ClosedError, match="this call is closed"):
        call.infer()


def test_the_result_of_a_closed_prepared_call_stays_valid(client: AnyClient, path: PathName) -> None:
    with client.prepare("identity", {"INPUT0": ((LENGTH,), np.float32)}, path=path) as call:
        call.inputs["INPUT0"][:] = 1
        result = call.infer()
    infer(client, 2, path=path).release()
    assert (result["OUTPUT0"] == 1).all()
