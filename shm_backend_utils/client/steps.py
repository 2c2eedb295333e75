"""The steps of a client's operations, and the drivers that run them: in blocking threads, or in asyncio tasks.

Operations have no I/O. Each is a generator: it yields a step to send or wait, receives the outcome, and returns the
result. So all code except this module and the transports serves both clients, and is written once. The deadlines of
steps are times of ``time.monotonic()``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ..errors import ClosedError
from ..process import call_after_fork, never_destroy
from .errors import NOT_SENT, out_of_time
from .explanation import Tally
from .transports.transport import AsyncTransport, Transport

__all__ = [
    "AsyncioDriver",
    "BlockingDriver",
    "Offload",
    "Pause",
    "Send",
    "SendForStream",
    "Short",
    "Steps",
    "Together",
    "Wait",
    "forget_locals",
    "left_until",
    "offloaded",
    "until_copied",
]

T = TypeVar("T")
AnyTransport = TypeVar("AnyTransport", bound=Transport | AsyncTransport)

_LEAST_S: Final = 1e-3
_USUAL_THREADS: Final = 16
_PACKAGE: Final = f"{Path(__file__).parents[1]}/"


def left_until(deadline: float) -> float:
    """Return the seconds until a deadline; never 0, so that an answer that is ready is taken. Sends do it inline."""
    return max(deadline - time.monotonic(), _LEAST_S)


class Send(NamedTuple):
    """Send a message; the outcome is the answer."""

    message: Any
    deadline: float


class SendForStream(NamedTuple):
    """Send a request that a stream answers; the outcome is the first answer, or None."""

    message: Any
    deadline: float


class Wait(NamedTuple):
    """Wait for a future's result, or a TimeoutError; a signal handler that would wait for its own thread gets None."""

    future: concurrent.futures.Future[Any]
    deadline: float
    thread: int | None = None


class Pause(NamedTuple):
    pause_s: float


class Offload(NamedTuple):
    """Do work that takes long; the outcome is its return value, or a TimeoutError."""

    work: Callable[[], Any]
    deadline: float


class Together(NamedTuple):
    """Run several operations side by side; when all have ended, the outcome is their results, or the first error."""

    operations: Sequence[Generator[Any, Any, Any]]
    deadline: float  # for threads: TimeoutError if an operation has not begun; begun ones have their own deadlines


OtherStep = SendForStream | Wait | Pause | Together
Step = Send | OtherStep | Offload | None
"""None asks for no work. It shows that the inputs have been copied, so that another thread may run the rest."""
Steps = Generator[Step, Any, T]
"""An operation that returns a ``T``."""


class Short(Generic[T]):  # no ABC, whose isinstance() would take each call one more function call
    """An operation whose message is ready, and which needs one answer."""

    message: Any
    settings: Any  # the call's CallSettings

    @abstractmethod
    def result(self, answer: Any) -> T | None:
        """Return the result; None if the answer is unusual, for :meth:`go_on`."""

    @abstractmethod
    def go_on(self, outcome: Any) -> Steps[T]:
        """Return the operation that handles an unusual answer, or an error."""


class _Driver(Generic[AnyTransport]):
    """The common part of both drivers: a connection, and threads."""

    def __init__(self, transport: AnyTransport, thread_count: int = _USUAL_THREADS) -> None:
        self.transport = transport
        # Not the event loop's own threads: if an application keeps those busy, every call would wait for them.
        self._threads = concurrent.futures.ThreadPoolExecutor(thread_count, "shm together")
        self._is_closed = False
        call_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child, never destroy the connection, which belongs to the parent."""
        never_destroy(self.transport)


class BlockingDriver(_Driver[Transport]):
    """Runs operations in the threads that call it; ``thread_count`` parts of a split call run side by side."""

    def run(self, operation: Steps[T] | Callable[[], Short[T] | Steps[T]], tally: Tally | None = None) -> T:
        """Run an operation, or the one that a function returns; return its result. ``tally`` counts an error."""
        steps: Steps[T] | None = None
        outcome: Any = None
        try:
            made = operation() if callable(operation) else operation
            if isinstance(made, Short):
                try:
                    left_s = max(made.settings.deadline - time.monotonic(), _LEAST_S)
                    outcome = self.transport.send(made.message, left_s)
                    result = made.result(outcome)
                    if result is not None:
                        return result
                except BaseException as error:  # the operation handles the error
                    outcome = error
                made = made.go_on(outcome)
                outcome = None  # else this frame and an error's traceback would form a cycle
            failures: list[BaseException] = []  # one at most, and only until it is thrown
            steps = made
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Send):
                        outcome = self.transport.send(step.message, max(step.deadline - time.monotonic(), _LEAST_S))
                    elif isinstance(step, Offload):
                        outcome = step.work()
                    elif step is not None:
                        outcome = self._do(step)
                except BaseException as error:  # the operation handles the error
                    failures.append(error)
                # Outside the handler, so that an error that the operation raises gets no other error as its context.
                step = steps.throw(failures.pop()) if failures else steps.send(outcome)
        except StopIteration as end:
            value: T = end.value
            return value
        except BaseException as error:
            outcome = made = None
            _end(steps, error, tally)
            raise

    def abandon(self) -> None:
        """Drop the threads without waiting, for finalizers; the threads end with the last reference to their pool."""
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "shm together")  # starts no thread yet

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)
        self.transport.close()

    def _do(self, step: OtherStep) -> Any:
        if isinstance(step, Wait):
            if step.thread == threading.get_ident():
                return None
            try:
                return step.future.result(left_until(step.deadline))
            except concurrent.futures.TimeoutError:  # the builtin TimeoutError only since Python 3.11
                raise TimeoutError from None
        if isinstance(step, Pause):
            return time.sleep(step.pause_s)
        if isinstance(step, SendForStream):
            with contextlib.closing(self.transport.stream(step.message, left_until(step.deadline))) as answers:
                return next(answers, None)
        return self._do_together(step.operations, step.deadline)

    def _do_together(self, operations: Sequence[Steps[Any]], deadline: float) -> list[Any]:
        futures: list[concurrent.futures.Future[Any]] = []
        try:
            for operation in operations:
                futures.append(self._threads.submit(self.run, operation))
        except RuntimeError:
            concurrent.futures.wait(futures)
            if self._is_closed:
                raise ClosedError("this client") from None
            raise
        _, late = concurrent.futures.wait(futures, left_until(deadline))
        begun = [future for future in late if not future.cancel()]
        concurrent.futures.wait(begun)
        if len(begun) < len(late):
            raise TimeoutError
        return [future.result() for future in futures]


class AsyncioDriver(_Driver[AsyncTransport]):
    """Runs operations in tasks of one event loop."""

    async def run(self, operation: Steps[T] | Callable[[], Short[T] | Steps[T]], tally: Tally | None = None) -> T:
        steps: Steps[T] | None = None
        outcome: Any = None
        try:
            made = operation() if callable(operation) else operation
            del operation  # it may have the user's arrays
            if isinstance(made, Short):
                try:
                    left_s = max(made.settings.deadline - time.monotonic(), _LEAST_S)
                    outcome = await self.transport.send(made.message, left_s)
                    result = made.result(outcome)
                    if result is not None:
                        return result
                except BaseException as error:  # the operation handles the error
                    outcome = error
                made = made.go_on(outcome)
                outcome = None  # else this frame and an error's traceback would form a cycle
            failures: list[BaseException] = []  # one at most, and only until it is thrown
            steps = made
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Send):
                        outcome = await self.transport.send(
                            step.message, max(step.deadline - time.monotonic(), _LEAST_S)
                        )
                    elif isinstance(step, Offload):
                        outcome = await self._offload(step)
                    elif step is not None:
                        outcome = await self._do(step)
                except BaseException as error:  # the operation handles the error
                    failures.append(error)
                # Outside the handler, so that an error that the operation raises gets no other error as its context.
                step = steps.throw(failures.pop()) if failures else steps.send(outcome)
        except StopIteration as end:
            value: T = end.value
            return value
        except BaseException as error:
            outcome = made = None
            _end(steps, error, tally)
            raise

    async def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)
        await self.transport.close()

    async def _do(self, step: OtherStep) -> Any:
        if isinstance(step, Wait):
            if step.future.done():
                return step.future.result()
            try:
                return await asyncio.wait_for(asyncio.wrap_future(step.future), left_until(step.deadline))
            except asyncio.TimeoutError:  # the builtin TimeoutError only since Python 3.11
                raise TimeoutError from None
        if isinstance(step, Pause):
            return await asyncio.sleep(step.pause_s)
        if isinstance(step, SendForStream):
            async with contextlib.aclosing(self.transport.stream(step.message, left_until(step.deadline))) as answers:
                return await anext(answers, None)
        return await self._do_together(step.operations)

    async def _offload(self, step: Offload) -> Any:
        if self._is_closed:
            raise ClosedError("this client")
        done = asyncio.get_running_loop().run_in_executor(self._threads, step.work)
        try:
            return await asyncio.wait_for(done, left_until(step.deadline))
        except asyncio.TimeoutError:  # the builtin TimeoutError only since Python 3.11
            raise TimeoutError from None

    async def _do_together(self, operations: Sequence[Steps[Any]]) -> list[Any]:
        tasks = [asyncio.ensure_future(self.run(operation)) for operation in operations]
        try:
            await asyncio.wait(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for error in [task.exception() for task in tasks]:  # read them all: asyncio logs errors that nothing reads
            if error is not None:
                raise error
        return [task.result() for task in tasks]


def _end(operation: Steps[Any] | None, error: BaseException, tally: Tally | None) -> None:
    """Close a failed operation, even one that an interrupt has stopped midway: other calls may wait for its end."""
    if tally is not None:
        tally.failed()
    if operation is not None:
        with contextlib.suppress(RuntimeError):  # close() raises it if the operation yields one more step
            operation.close()
    forget_locals(error)


def until_copied(operation: Steps[Any]) -> Steps[None]:
    """Run a call until its inputs have been copied; the rest may run later, in another thread."""
    step = next(operation)
    while step is not None:
        try:
            outcome = yield step
        except BaseException as error:  # the call handles the error
            step = operation.throw(error)
        else:
            step = operation.send(outcome)


def offloaded(work: Callable[[], T], deadline: float, doing: str, request: str = NOT_SENT) -> Steps[T]:
    """Do work that takes long, in another thread for asyncio; raises :func:`out_of_time` with ``doing``."""
    try:
        return (yield Offload(work, deadline))  # type: ignore[no-any-return]
    except TimeoutError:
        raise out_of_time(doing, request) from None


def forget_locals(error: BaseException) -> None:
    """Clear the locals of this package's functions, and of all that these called, from an error's traceback."""
    errors: list[BaseException | None] = [error]
    seen = set()
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        errors += (each.__cause__, each.__context__)
        trace = each.__traceback__
        is_ours = False
        while trace is not None:
            is_ours = is_ours or trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)
            if is_ours:
                with contextlib.suppress(RuntimeError):
                    trace.tb_frame.clear()
            trace = trace.tb_next
