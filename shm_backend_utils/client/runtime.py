"""How a client waits: by blocking its thread, or by giving way to other tasks.

All else is the same for both clients and written once, as coroutines. The blocking client runs such a coroutine to its
end at once: nothing that it awaits ever suspends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from ..errors import ClosedError

__all__ = ["AsyncioRuntime", "BlockingRuntime", "Runtime", "run"]

T = TypeVar("T")

_USUAL_THREADS: Final = 16


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return what it returns."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise AssertionError("a coroutine of the blocking client suspended")


class Runtime(ABC):
    """How to wait for something, and where to do what takes long."""

    @abstractmethod
    async def wait(self, future: concurrent.futures.Future[T], timeout_s: float) -> T:
        """Return the future's result, or raise TimeoutError."""

    @abstractmethod
    async def pause(self, pause_s: float) -> None:
        """Wait for some seconds."""

    @abstractmethod
    async def offload(self, work: Callable[[], T]) -> T:
        """Do work that takes long, and return what it returns."""

    @abstractmethod
    async def gather(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run several coroutines side by side; when all have ended, return their results or raise the first error."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads."""


class BlockingRuntime(Runtime):
    """For a client whose callers are threads; ``thread_count`` is how many coroutines are run side by side."""

    def __init__(self, thread_count: int = _USUAL_THREADS) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(thread_count, "shm chunk")
        self._is_closed = False

    async def wait(self, future: concurrent.futures.Future[T], timeout_s: float) -> T:
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:  # before Python 3.11 not the builtin one
            raise TimeoutError from None

    async def pause(self, pause_s: float) -> None:
        time.sleep(pause_s)

    async def offload(self, work: Callable[[], T]) -> T:
        return work()

    async def gather(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        futures: list[concurrent.futures.Future[T]] = []
        try:
            for work in works:
                futures.append(self._threads.submit(run, work))
        except RuntimeError:
            for work in works[len(futures) :]:
                work.close()
            concurrent.futures.wait(futures)
            if self._is_closed:
                raise ClosedError("this client") from None
            raise
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)


class AsyncioRuntime(Runtime):
    """For a client whose callers are tasks of one event loop."""

    async def wait(self, future: concurrent.futures.Future[T], timeout_s: float) -> T:
        if future.done():
            return future.result()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except asyncio.TimeoutError:  # before Python 3.11 not the builtin one
            raise TimeoutError from None

    async def pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    async def offload(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def gather(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for error in [task.exception() for task in tasks]:  # of all: asyncio complains of those that nobody looks at
            if error is not None:
                raise error
        return [task.result() for task in tasks]

    def close(self) -> None:
        pass
