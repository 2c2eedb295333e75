"""The two ways to wait: by blocking a thread, and by giving way to other tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from shm_backend_utils.client.options import check_timeout
from shm_backend_utils.client.runtime import AsyncioRuntime, BlockingRuntime, Runtime, run
from shm_backend_utils.errors import CallerError, ClosedError

LONG_S = 30.0
Future = concurrent.futures.Future[Any]
RunWith = Callable[[Callable[[Runtime], Coroutine[Any, Any, Any]]], Any]


def run_blocking(work: Callable[[Runtime], Coroutine[Any, Any, Any]]) -> Any:
    with contextlib.closing(BlockingRuntime()) as runtime:
        return run(work(runtime))


def run_asyncio(work: Callable[[Runtime], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        with contextlib.closing(AsyncioRuntime()) as runtime:
            return await work(runtime)

    return asyncio.run(main())


@pytest.fixture(params=[run_blocking, run_asyncio], ids=["blocking", "asyncio"])
def run_with(request: pytest.FixtureRequest) -> RunWith:
    """Runs a coroutine with a runtime of either kind."""
    chosen: RunWith = request.param
    return chosen


@pytest.fixture
def thread() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        yield thread


async def value(of: Any) -> Any:
    return of


async def failure(error: BaseException) -> Any:
    raise error


def test_a_coroutine_that_never_suspends_is_run_to_its_end() -> None:
    async def outer() -> Any:
        return await value(1) + await value(2)

    assert run(outer()) == 3


def test_the_error_of_such_a_coroutine_is_raised() -> None:
    with pytest.raises(KeyError, match="it"):
        run(failure(KeyError("it")))


def test_a_coroutine_that_suspends_is_an_error_of_the_library_and_is_closed() -> None:
    closed = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(AssertionError, match="suspended"):
        run(suspends())
    assert closed == [True]


def test_a_future_that_is_done_is_not_waited_for(run_with: RunWith) -> None:
    future = Future()
    future.set_result(42)
    assert run_with(lambda runtime: runtime.wait(future, 1e-9)) == 42


def test_a_future_is_waited_for(run_with: RunWith, thread: concurrent.futures.ThreadPoolExecutor) -> None:
    go = threading.Event()
    future = thread.submit(lambda: go.wait(LONG_S) and 42)

    async def work(runtime: Runtime) -> Any:
        threading.Timer(0.01, go.set).start()
        return await runtime.wait(future, LONG_S)

    assert run_with(work) == 42


def test_waiting_ends(run_with: RunWith) -> None:
    with pytest.raises(TimeoutError):
        run_with(lambda runtime: runtime.wait(Future(), 0.01))


def test_the_error_of_a_future_is_raised(run_with: RunWith) -> None:
    future = Future()
    future.set_exception(KeyError("it"))
    with pytest.raises(KeyError):
        run_with(lambda runtime: runtime.wait(future, LONG_S))


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_time_that_is_accepted_can_be_waited(
    run_with: RunWith, thread: concurrent.futures.ThreadPoolExecutor, timeout_s: float
) -> None:
    try:
        patience_s = check_timeout(timeout_s)
    except CallerError:
        return
    go = threading.Event()
    future = thread.submit(go.wait, LONG_S)
    threading.Timer(0.01, go.set).start()
    assert run_with(lambda runtime: runtime.wait(future, patience_s))


def test_what_takes_long_is_done(run_with: RunWith) -> None:
    assert run_with(lambda runtime: runtime.offload(lambda: 42)) == 42


def test_the_error_of_what_takes_long_is_raised(run_with: RunWith) -> None:
    with pytest.raises(ZeroDivisionError):
        run_with(lambda runtime: runtime.offload(lambda: 1 // 0))


def test_a_thread_does_itself_what_takes_long() -> None:
    assert run_blocking(lambda runtime: runtime.offload(threading.get_ident)) == threading.get_ident()


def test_an_event_loop_goes_on_while_something_takes_long() -> None:
    go = threading.Event()

    async def work(runtime: Runtime) -> bool:
        task = asyncio.ensure_future(runtime.offload(lambda: go.wait(LONG_S)))
        await asyncio.sleep(0)
        go.set()
        return await task

    assert run_asyncio(work)


def test_results_are_gathered_in_order(run_with: RunWith) -> None:
    assert run_with(lambda runtime: runtime.gather([value(number) for number in range(40)])) == list(range(40))


def test_threads_run_side_by_side() -> None:
    together = threading.Barrier(8, timeout=LONG_S)

    async def meet() -> None:
        together.wait()

    assert run_blocking(lambda runtime: runtime.gather([meet() for _ in range(8)])) == [None] * 8


def test_tasks_run_side_by_side() -> None:
    async def work(runtime: Runtime) -> list[Any]:
        both = [asyncio.Event(), asyncio.Event()]

        async def meet(mine: int) -> None:
            both[mine].set()
            await asyncio.wait_for(both[1 - mine].wait(), LONG_S)

        return await runtime.gather([meet(0), meet(1)])

    assert run_asyncio(work) == [None, None]


def test_the_first_error_is_raised_when_all_have_ended(run_with: RunWith) -> None:
    ended = []

    async def end(number: int) -> None:
        ended.append(number)
        if number in (1, 2):
            raise KeyError(number)

    with pytest.raises(KeyError, match="1"):
        run_with(lambda runtime: runtime.gather([end(number) for number in range(4)]))
    assert sorted(ended) == [0, 1, 2, 3]


def test_nothing_is_gathered_once_it_is_closed_and_nothing_is_left_waiting() -> None:
    runtime = BlockingRuntime()
    runtime.close()
    works = [value(number) for number in range(4)]
    with pytest.raises(ClosedError):
        run(runtime.gather(works))
    assert {inspect.getcoroutinestate(work) for work in works} == {inspect.CORO_CLOSED}


def test_a_task_that_is_cancelled_cancels_what_it_gathers_and_waits_for_its_end() -> None:
    ended = []

    async def work(runtime: Runtime) -> None:
        begun = asyncio.Event()

        async def stay() -> None:
            try:
                begun.set()
                await asyncio.sleep(LONG_S)
            finally:
                ended.append(True)

        task = asyncio.ensure_future(runtime.gather([stay(), stay()]))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True, True]

    run_asyncio(work)
    assert ended


def test_waiting_that_is_cancelled_cancels_the_future() -> None:
    future = Future()

    async def work(runtime: Runtime) -> None:
        task = asyncio.ensure_future(runtime.wait(future, LONG_S))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_asyncio(work)
    assert future.cancelled()
