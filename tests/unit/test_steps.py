"""The two drivers of a client's operations: one blocks a thread, the other gives way to other tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client.options import check_timeout
from shm_backend_utils.client.steps import (
    AsyncioDriver,
    BlockingDriver,
    Offload,
    Pause,
    Send,
    Steps,
    Together,
    Wait,
    forget_locals,
)
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.errors import CallerError, ClosedError

LONG_S = 30.0
Future = concurrent.futures.Future[Any]
RunWith = Callable[[Steps[Any]], Any]


class Echo:
    """A transport whose server answers each message with itself, or raises it; notes what it is asked."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, float]] = []
        self.is_closed = False

    def send(self, message: Any, timeout_s: float) -> Any:
        self.sent.append((message, timeout_s))
        if isinstance(message, BaseException):
            raise message
        return message

    def close(self) -> None:
        self.is_closed = True


class AsyncEcho(Echo):
    async def send(self, message: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        return Echo.send(self, message, timeout_s)

    async def close(self) -> None:  # type: ignore[override]
        self.is_closed = True


def blocking(echo: Echo | None = None, thread_count: int = 16) -> BlockingDriver:
    return BlockingDriver(cast(Transport, echo or Echo()), thread_count)


def run_blocking(operation: Steps[Any]) -> Any:
    with contextlib.closing(blocking()) as driver:
        return driver.run(operation)


def in_loop(work: Callable[[AsyncioDriver], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        driver = AsyncioDriver(cast(AsyncTransport, AsyncEcho()))
        try:
            return await work(driver)
        finally:
            await driver.close()

    return asyncio.run(main())


def run_asyncio(operation: Steps[Any]) -> Any:
    return in_loop(lambda driver: driver.run(operation))


@pytest.fixture(params=[run_blocking, run_asyncio], ids=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest) -> RunWith:
    """Does an operation with a driver of either kind."""
    chosen: RunWith = request.param
    return chosen


@pytest.fixture
def thread() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        yield thread


def value(of: Any) -> Steps[Any]:
    yield from ()
    return of


def failure(error: BaseException) -> Steps[Any]:
    yield from ()
    raise error


def step(one: Any) -> Steps[Any]:
    """Return an operation of one step, which returns what comes of it."""
    return (yield one)


def test_an_operation_without_steps_is_done(run: RunWith) -> None:
    def outer() -> Steps[Any]:
        return (yield from value(1)) + (yield from value(2))

    assert run(outer()) == 3


def test_the_error_of_an_operation_is_raised(run: RunWith) -> None:
    with pytest.raises(KeyError, match="it"):
        run(failure(KeyError("it")))


def test_each_step_gets_what_comes_of_it(run: RunWith) -> None:
    def outer() -> Steps[Any]:
        return [(yield Send("message", LONG_S)), (yield Offload(lambda: 2)), (yield Pause(0))]

    assert run(outer()) == ["message", 2, None]


def test_a_message_is_sent_with_its_time() -> None:
    echo = Echo()
    with contextlib.closing(blocking(echo)) as driver:
        driver.run(step(Send("message", 1.5)))
    assert echo.sent == [("message", 1.5)]
    assert echo.is_closed


@pytest.mark.parametrize("error", [KeyError("it"), KeyboardInterrupt()], ids=repr)
def test_an_operation_may_go_on_after_an_error_of_a_step(run: RunWith, error: BaseException) -> None:
    def outer() -> Steps[Any]:
        with pytest.raises(type(error)) as caught:
            yield Send(error, LONG_S)
        assert caught.value is error
        return (yield Send("again", LONG_S))

    assert run(outer()) == "again"


def test_the_error_of_a_step_ends_an_operation_that_does_not_catch_it(run: RunWith) -> None:
    ended = []

    def outer() -> Steps[Any]:
        try:
            yield Send(KeyError("it"), LONG_S)
        finally:
            ended.append(True)

    with pytest.raises(KeyError, match="it"):
        run(outer())
    assert ended == [True]


def test_a_future_that_is_done_is_not_waited_for(run: RunWith) -> None:
    future = Future()
    future.set_result(42)
    assert run(step(Wait(future, 1e-9))) == 42


def test_a_future_is_waited_for(run: RunWith, thread: concurrent.futures.ThreadPoolExecutor) -> None:
    go = threading.Event()
    future = thread.submit(lambda: go.wait(LONG_S) and 42)
    threading.Timer(0.01, go.set).start()
    assert run(step(Wait(future, LONG_S))) == 42


def test_waiting_ends(run: RunWith) -> None:
    with pytest.raises(TimeoutError):
        run(step(Wait(Future(), 0.01)))


def test_the_error_of_a_future_is_raised(run: RunWith) -> None:
    future = Future()
    future.set_exception(KeyError("it"))
    with pytest.raises(KeyError):
        run(step(Wait(future, LONG_S)))


@pytest.mark.parametrize("timeout_s", [1e7, 1e10, float("inf")])
def test_a_time_that_is_accepted_can_be_waited(
    run: RunWith, thread: concurrent.futures.ThreadPoolExecutor, timeout_s: float
) -> None:
    try:
        patience_s = check_timeout(timeout_s)
    except CallerError:
        return
    go = threading.Event()
    future = thread.submit(go.wait, LONG_S)
    threading.Timer(0.01, go.set).start()
    assert run(step(Wait(future, patience_s)))


def test_the_error_of_what_takes_long_is_raised(run: RunWith) -> None:
    with pytest.raises(ZeroDivisionError):
        run(step(Offload(lambda: 1 // 0)))


def test_a_thread_does_itself_what_takes_long() -> None:
    assert run_blocking(step(Offload(threading.get_ident))) == threading.get_ident()


def test_an_event_loop_goes_on_while_something_takes_long() -> None:
    go = threading.Event()

    async def work(driver: AsyncioDriver) -> Any:
        task = asyncio.ensure_future(driver.run(step(Offload(lambda: go.wait(LONG_S)))))
        await asyncio.sleep(0)
        go.set()
        return await task

    assert in_loop(work)


def test_what_takes_long_does_not_wait_for_the_loops_own_threads() -> None:
    go = threading.Event()

    async def work(driver: AsyncioDriver) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as busy:
            asyncio.get_running_loop().set_default_executor(busy)
            busy.submit(go.wait, LONG_S)
            try:
                return await asyncio.wait_for(driver.run(step(Offload(lambda: 42))), LONG_S / 2)
            finally:
                go.set()

    assert in_loop(work) == 42


def test_results_of_operations_side_by_side_are_in_order(run: RunWith) -> None:
    assert run(step(Together([value(number) for number in range(40)]))) == list(range(40))


def test_threads_run_side_by_side() -> None:
    together = threading.Barrier(8, timeout=LONG_S)

    def meet() -> Steps[None]:
        yield Offload(together.wait)

    assert run_blocking(step(Together([meet() for _ in range(8)]))) == [None] * 8


def test_tasks_run_side_by_side() -> None:
    futures = [Future(), Future()]

    def meet(mine: int) -> Steps[Any]:
        futures[mine].set_result(mine)
        return (yield Wait(futures[1 - mine], LONG_S))

    assert run_asyncio(step(Together([meet(0), meet(1)]))) == [1, 0]


def test_the_first_error_is_raised_when_all_have_ended(run: RunWith) -> None:
    ended = []

    def end(number: int) -> Steps[None]:
        yield Pause(0)
        ended.append(number)
        if number in (1, 2):
            raise KeyError(number)

    with pytest.raises(KeyError, match="1"):
        run(step(Together([end(number) for number in range(4)])))
    assert sorted(ended) == [0, 1, 2, 3]


def test_nothing_is_done_side_by_side_once_it_is_closed() -> None:
    driver = blocking()
    driver.close()
    with pytest.raises(ClosedError):
        driver.run(step(Together([value(number) for number in range(4)])))


def test_nothing_takes_long_once_it_is_closed() -> None:
    async def work(driver: AsyncioDriver) -> None:
        await driver.close()
        with pytest.raises(ClosedError):
            await driver.run(step(Offload(lambda: 42)))

    in_loop(work)


def test_a_task_that_is_cancelled_cancels_what_it_does_and_waits_for_its_end() -> None:
    ended = []

    async def work(driver: AsyncioDriver) -> None:
        def stay() -> Steps[None]:
            try:
                yield Pause(LONG_S)
            finally:
                ended.append(True)

        task = asyncio.ensure_future(driver.run(step(Together([stay(), stay()]))))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True, True]

    in_loop(work)
    assert ended


def test_waiting_that_is_cancelled_cancels_the_future() -> None:
    future = Future()

    async def work(driver: AsyncioDriver) -> None:
        task = asyncio.ensure_future(driver.run(step(Wait(future, LONG_S))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(work)
    assert future.cancelled()


class Held:
    """What must not be kept."""


def test_an_error_keeps_nothing_of_the_operation_that_raised_it(run: RunWith) -> None:
    held = Held()
    alive = weakref.ref(held)

    def outer(mine: Held) -> Steps[Any]:
        return (yield Send(KeyError(repr(mine)), LONG_S))

    operation = outer(held)
    del held
    with pytest.raises(KeyError) as caught:
        run(operation)
    del operation
    gc.collect()
    assert caught.value is not None
    assert alive() is None


def test_what_an_error_keeps_of_this_packages_functions_is_forgotten() -> None:
    array = np.zeros((2, 3))
    alive = weakref.ref(array)
    with pytest.raises(CallerError) as caught:
        check_timeout(array)
    error = caught.value
    del array, caught
    assert alive() is not None
    forget_locals(error)
    gc.collect()
    assert alive() is None
