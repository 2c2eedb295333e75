"""The two ways to do an operation's steps: by blocking a thread, and by giving way to other tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

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
LATER = time.monotonic() + 1e6
Future = concurrent.futures.Future[Any]
Run = Callable[[Steps[Any]], Any]


class Echo(Transport):
    def send(self, message: Any, timeout_s: float) -> Any:
        return message

    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        yield message

    def close(self) -> None:
        pass


class AsyncEcho(AsyncTransport):
    async def send(self, message: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        return message

    async def stream(self, message: Any, timeout_s: float) -> Any:
        yield message

    async def close(self) -> None:
        pass


def run_blocking(operation: Steps[Any]) -> Any:
    with contextlib.closing(BlockingDriver(Echo())) as driver:
        return driver.run(operation)


def run_asyncio(operation: Steps[Any]) -> Any:
    async def main() -> Any:
        driver = AsyncioDriver(AsyncEcho())
        try:
            return await driver.run(operation)
        finally:
            await driver.close()

    return asyncio.run(main())


@pytest.fixture(params=[run_blocking, run_asyncio], ids=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


def one(step: Any) -> Steps[Any]:
    return (yield step)


@pytest.mark.parametrize("timeout_s", [1e7, 1e10, float("inf")])
def test_accepted_times_are_waited(run: Run, timeout_s: float) -> None:
    try:
        deadline = time.monotonic() + check_timeout(timeout_s)
    except CallerError:
        return
    future = Future()
    threading.Timer(0.01, future.set_result, [True]).start()
    assert run(one(Wait(future, deadline)))
    with pytest.raises(TimeoutError):
        run(one(Wait(Future(), time.monotonic() + 0.01)))


def test_a_thread_does_itself_what_takes_long_and_a_loop_goes_on_meanwhile() -> None:
    async def main() -> Any:
        driver, go, loop = AsyncioDriver(AsyncEcho()), threading.Event(), asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(1) as busy:
            loop.set_default_executor(busy)  # it does not wait for the loop's own threads
            before = loop.run_in_executor(None, go.wait, LONG_S)
            task = asyncio.ensure_future(driver.run(one(Offload(lambda: work.wait(LONG_S), LATER))))
            await asyncio.sleep(0)
            work.set()
            try:
                return await asyncio.wait_for(task, LONG_S)
            finally:
                go.set()
                await before
                await driver.close()

    work = threading.Event()
    assert asyncio.run(main())
    assert run_blocking(one(Offload(threading.get_ident, LATER))) == threading.get_ident()


def test_what_is_done_together_is_done_side_by_side(run: Run) -> None:
    barrier = threading.Barrier(8, timeout=LONG_S)

    def meet() -> Steps[Any]:
        yield Offload(barrier.wait, LATER)

    assert run(one(Together([meet() for _ in range(8)], LATER))) == [None] * 8


def test_nothing_is_done_in_a_thread_once_a_driver_is_closed() -> None:
    async def main() -> None:
        driver = AsyncioDriver(AsyncEcho())
        await driver.close()
        with pytest.raises(ClosedError):
            await driver.run(one(Offload(lambda: 42, LATER)))

    asyncio.run(main())
    driver = BlockingDriver(Echo())
    driver.close()
    with pytest.raises(ClosedError):
        driver.run(one(Together([one(Pause(0))], LATER)))


def test_the_first_error_is_raised_when_all_have_ended(run: Run) -> None:
    ended = []

    def end(number: int) -> Steps[None]:
        yield Pause(0.01 * (3 - number))
        ended.append(number)
        if number in (1, 2):
            raise KeyError(number)

    with pytest.raises(KeyError, match="1"):
        run(one(Together([end(number) for number in range(4)], LATER)))
    assert sorted(ended) == [0, 1, 2, 3]


WAITED_FOR = Future()


@pytest.mark.parametrize(
    "step",
    [
        *(Send("message", LATER), Wait(WAITED_FOR, LATER), Pause(LONG_S), Offload(lambda: time.sleep(0.05), LATER)),
        Together([one(Pause(LONG_S)), one(Pause(LONG_S))], LATER),
    ],
    ids=lambda step: type(step).__name__,
)
def test_cancellation_reaches_the_operation_at_every_step(step: Any) -> None:
    seen: list[BaseException] = []

    def operation() -> Steps[None]:
        try:
            yield step
        except BaseException as error:
            seen.append(error)
            raise

    async def main() -> None:
        driver = AsyncioDriver(AsyncEcho())
        task = asyncio.ensure_future(driver.run(operation()))
        for _ in range(1 if isinstance(step, Send) else 3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await driver.close()

    asyncio.run(main())
    assert [type(error) for error in seen] == [asyncio.CancelledError]
    if isinstance(step, Wait):
        assert WAITED_FOR.cancelled()
    if isinstance(step, Together):
        assert all(inspect.getgeneratorstate(each) == inspect.GEN_CLOSED for each in step.operations)


def test_an_error_keeps_nothing_of_what_an_operation_had_in_hand(run: Run) -> None:
    alive: list[weakref.ref[Any]] = []

    def memory() -> Any:
        array = np.zeros(8)
        alive.append(weakref.ref(array))
        return array

    def operation() -> Steps[None]:
        held = yield Offload(memory, LATER)
        parts = held[1:]
        try:
            raise ValueError(parts.nbytes)
        except ValueError as error:
            raise KeyError("it") from error

    gc.disable()
    try:
        with pytest.raises(KeyError) as kept:
            run(operation())
        assert [reference() for reference in alive] == [None], kept
    finally:
        gc.enable()


def test_what_the_callers_had_in_hand_stays() -> None:
    def of_the_caller() -> None:
        treasure = 42
        raise KeyError(treasure)

    with pytest.raises(KeyError) as caught:
        of_the_caller()
    assert caught.tb.tb_next is not None
    frame = caught.tb.tb_next.tb_frame
    forget_locals(caught.value)
    assert frame.f_locals == {"treasure": 42}
