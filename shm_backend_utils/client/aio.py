"""AsyncShmClient: the same client for tasks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Final, TypeVar

from ..errors import CallerError
from ..process import Origin, Unclosed
from .core import Core
from .errors import ForkedError
from .explanation import Explanation, Tally
from .methods import ClientMethods
from .paths.call import LONG_COPY
from .prepared import AsyncPreparedCall
from .result import Result
from .server_calls import start
from .steps import AsyncioDriver, Steps
from .streams import OpenStream
from .transports.transport import connect_async

__all__ = ["AsyncShmClient"]

_CLOSE_OR_WITH: Final = "await close(), or use it in an async with statement"

T = TypeVar("T")


class AsyncShmClient(
    ClientMethods[
        Coroutine[Any, Any, Result],
        Coroutine[Any, Any, AsyncPreparedCall],
        AsyncGenerator[Result, None],
        Coroutine[Any, Any, Explanation],
        Coroutine[Any, Any, bool],
        Coroutine[Any, Any, dict[str, Any]],
        Coroutine[Any, Any, None],
    ]
):
    """A :class:`ShmClient` for asyncio. It belongs to the event loop of its first call.

    It connects at the first call, or on entry to its ``async with`` block, which also checks that a server answers.

    Each method returns a coroutine of the documented value; await it once. Read a stream by ``async for``; its
    ``aclose()`` ends it early. Arguments that cannot be sent raise at once, all other errors where you await. The time
    runs from the call, not from the first ``await``. Large copies run in a thread, so that other tasks go on. Do not
    change the inputs before the answer.

    Parameters
    ----------
    url, timeout_s, path, pool, tls, cuda, wait_ready_s, inline_bytes
        As in :class:`ShmClient`, but ``wait_ready_s`` applies to entering ``async with``. Calls keep their time limit
        more strictly: a late call ends even if a thread is still copying, waiting, looking up a host name or making
        memory for it. Its memory stays in use until the thread is done. A wrong value is a CallerError.
    """

    _driver: AsyncioDriver
    _kind_of_prepared = AsyncPreparedCall
    _most_bytes = LONG_COPY
    _loop: asyncio.AbstractEventLoop | None = None

    def submit(self, model: str, inputs: Mapping[str, Any], **named: Any) -> asyncio.Task[Result]:
        """Schedule :meth:`infer` as a task. Keep a reference to it: the event loop holds only a weak one.

        An argument that cannot be sent raises CallerError or TypeError at once.
        """
        return asyncio.ensure_future(self.infer(model, inputs, **named))

    async def close(self) -> None:
        """Close the connection and remove the shared memory, and unregister it, as :meth:`ShmClient.close` does."""
        core, self._core = self._core, None
        if core is not None and self._loop is not None and not core.is_forked:
            driver = self._driver
            del self._driver  # and so its gRPC connection, which a process that forks must not have
            await driver.run(core.close())
            await driver.close()
        self._memory.end()

    async def __aenter__(self) -> AsyncShmClient:
        try:
            await self._run(start(self._open_core(), self._settings))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def _begin(self) -> None:
        self._origin = Origin.here("the AsyncShmClient made")

    async def _run(self, operation: Any, tally: Tally | None = None) -> Any:
        if self._core is None or self._core.is_forked or self._loop is not asyncio.get_running_loop():
            self._open()
        running = self._driver.run(operation, tally)
        del operation  # else it keeps the user's arrays as long as the request
        return await running

    async def _responses(self, core: Core, opening: Steps[OpenStream]) -> AsyncGenerator[Result, None]:
        driver, _ = self._open()
        with await driver.run(opening, core.tally) as stream:
            answers = driver.transport.stream(stream.call.message(), stream.timeout_s)
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if results := await driver.run(stream.results(answer)):
                        yield results.pop()  # keep no reference: the frame is free when the user drops the result
                    if core.is_forked:
                        raise ForkedError("this stream")
                    del answer  # on Python 3.13, an interrupt where a loop ends with `if` would skip `finally`

    def _open(self) -> tuple[AsyncioDriver, Core]:
        core, loop = self._open_core(), asyncio.get_running_loop()
        if self._loop is None:
            self._driver = AsyncioDriver(connect_async(self._settings.url, self._settings.tls))
            core.connect(self._driver.transport, self._settings.inline_bytes)
            self._unclosed = Unclosed(self._origin, _CLOSE_OR_WITH, core.rest_at_server)
            self._loop = loop
        elif self._loop is not loop:
            raise CallerError("this client belongs to another event loop; make one client in each loop")
        return self._driver, core
