"""AsyncShmClient: the same client for tasks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ..errors import CallerError, ClosedError
from ..memory.cuda.access import CudaAccess
from ..memory.pool.options import PoolOptions
from ..origin import Origin
from ..unclosed import Unclosed
from .calls import infer, prepare
from .client_memory import ClientMemory
from .core import Core
from .errors import ForkedError
from .explanation import Explanation
from .inputs.descriptions import InputDescription, Outputs
from .options import LibraryName, PathName, RequestOptions, Tls, check_keywords
from .prepared import AsyncPreparedCall
from .result import Result
from .server_calls import start
from .server_methods import AsyncServerMethods, P, ServerCall, T
from .settings import CallSettings, ClientSettings
from .split import infer_split
from .stats import ClientStats
from .steps import AsyncioDriver
from .streams import holding_told, on_their_gpus, open_stream, responses_of
from .transports.connect import Connectable, connect_async

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncShmClient"]

_CLOSE_OR_WITH: Final = "await close(), or use it in an async with statement"


class AsyncShmClient(AsyncServerMethods):
    """As :class:`ShmClient`, with ``await``. Belongs to the event loop of its first call.

    It connects at the first call, or when its ``async with`` block is entered, which also makes sure that there is a
    server.

    Parameters
    ----------
    url, timeout_s, path, pool, tls, cuda, wait_ready_s, inline_bytes
        As of :class:`ShmClient`; it is entering ``async with`` that waits for the server. There is less slack: where a
        thread copies, waits, looks up a host name, or makes memory for a call, it goes on without that, and the memory
        is in use for so long.

    Raises
    ------
    CallerError
        One of them is none that will do. Whether a server answers, the first call or ``async with`` tells.
    """

    _opened: tuple[AsyncioDriver, Core] | None = None

    def __init__(
        self,
        url: str | Connectable,
        *,
        timeout_s: float = 60.0,
        path: PathName = "auto",
        pool: PoolOptions | None = None,
        tls: Tls | None = None,
        cuda: CudaAccess | None = None,
        wait_ready_s: float | None = None,
        inline_bytes: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_keywords(type(self).__name__, unknown)
        self._settings = ClientSettings(url, timeout_s, path, tls, wait_ready_s, inline_bytes)
        self._memory = ClientMemory(pool or PoolOptions(), cuda or CudaAccess())
        self._memory.end_with(self)
        self._origin = Origin.here("the AsyncShmClient made")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        split: bool = False,
        stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> Coroutine[Any, Any, Result]:
        """Run a model. As :meth:`ShmClient.infer`; the time runs from the call, not from the first ``await``.

        Large copies are made in a thread, so that other tasks go on; the inputs must not change before the answer.

        Parameters
        ----------
        model, inputs, outputs, timeout_s, path, split, stream, library, **options
            As of :meth:`ShmClient.infer`.

        Returns
        -------
        coroutine of Result
            To be awaited once. It raises as :meth:`ShmClient.infer`.

        Raises
        ------
        CallerError, TypeError
            At once: an argument is none that can be sent.
        """
        settings = self._settings.of_call("infer", model, path, timeout_s, options, stream, library)
        return self._infer(settings, inputs, outputs, split)

    def submit(self, model: str, inputs: Mapping[str, Any], **named: Any) -> asyncio.Task[Result]:
        """As :meth:`infer`, in a task of its own.

        Parameters
        ----------
        model, inputs, **named
            As of :meth:`infer`.

        Returns
        -------
        asyncio.Task of Result
            Started already. Keep it: the event loop alone does not.

        Raises
        ------
        CallerError, TypeError
            At once: an argument is none that can be sent.
        """
        return asyncio.ensure_future(self.infer(model, inputs, **named))

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, InputDescription],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> Coroutine[Any, Any, AsyncPreparedCall]:
        """Return a call whose inputs are to be filled in place. As :meth:`ShmClient.prepare`.

        ``with await client.prepare(...) as call: ... await call.infer()``

        Parameters
        ----------
        model, inputs, outputs, timeout_s, path, library, **options
            As of :meth:`ShmClient.prepare`.

        Returns
        -------
        coroutine of AsyncPreparedCall
            To be awaited once. It raises as :meth:`ShmClient.prepare`.

        Raises
        ------
        CallerError, TypeError
            At once: an argument is none that can be sent.
        """
        settings = self._settings.of_call("prepare", model, path, timeout_s, options, library=library)
        return self._prepare(settings, inputs, outputs, self._settings.patience_s(timeout_s))

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        frames: int | None = None,
        stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Result, None]:
        """Yield the responses of a decoupled model as they come, for ``async for``. Over gRPC.

        Parameters
        ----------
        model, inputs, outputs, timeout_s, path, frames, stream, library, **options
            As of :meth:`ShmClient.stream`.

        Yields
        ------
        Result
            As of :meth:`ShmClient.stream`. To stop early, ``await`` the iterator's ``aclose()``.

        Raises
        ------
        CallerError, TypeError, InferenceError, DeadlineExceededError, ServerUnavailableError
            As of :meth:`ShmClient.stream`, all of them when the first response is asked for, or a later one.
        """
        settings = self._settings.of_call("stream", model, path, timeout_s, options, stream, library)
        driver, core = self._open()
        avoided = 0
        with core.tally.failures():
            opened = await driver.run(open_stream(core, settings, inputs, outputs, frames))
            with contextlib.closing(opened.call), holding_told(opened):
                message = opened.call.message()
                answers = driver.transport.stream(message, self._settings.patience_s(timeout_s))
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        results = responses_of(core, opened, answer)
                        if opened.output_devices:
                            await driver.run(on_their_gpus(core, opened, results))
                        avoided += sum(result.bytes_avoided for result in results)
                        while results:
                            yield results.pop()  # held by nobody here: its frame is free when the user lets go of it
                        if core.is_forked:
                            raise ForkedError("this stream")
        core.tally.succeeded(opened.call.path, avoided)

    async def explain(self, model: str, *, model_version: str = "") -> Explanation:
        """Check anew which path calls of a model take, and why.

        Parameters
        ----------
        model, model_version
            As of :meth:`ShmClient.explain`.

        Returns
        -------
        Explanation
            Printed, it is a table.

        Raises
        ------
        InferenceError, DeadlineExceededError, ServerUnavailableError
            As of :meth:`ShmClient.explain`.
        """
        driver, core = self._open()
        return await driver.run(core.explain(model, model_version, self._settings.timeout_s))

    def stats(self) -> ClientStats:
        """Return what this client has done so far. Within its event loop.

        Returns
        -------
        ClientStats
            Figures of this moment; they do not change afterwards.

        Raises
        ------
        ClosedError
            The client was closed.
        """
        return self._open()[1].stats()

    async def close(self) -> None:
        """Close the connection and remove the shared memory, and unregister it, as :meth:`ShmClient.close` does."""
        self._is_closed = True
        opened, self._opened = self._opened, None
        if opened is not None and not opened[1].is_forked:
            driver, core = opened
            await driver.run(core.close())
            await driver.close()
        self._memory.end()

    def __repr__(self) -> str:
        state = "closed" if vars(self).get("_is_closed", True) else "not connected yet"
        if self._opened is not None:
            state = self._opened[1].state
        return f"<{type(self).__name__} {vars(self).get('_settings', 'of no server')} {state}>"

    async def __aenter__(self) -> AsyncShmClient:
        try:
            driver, core = self._open()
            await driver.run(start(core, self._settings))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _infer(self, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, split: bool) -> Result:
        opened = self._opened
        if opened is None or self._memory.pool.is_forked or self._loop is not asyncio.get_running_loop():
            opened = self._open()
        driver, core = opened
        try:
            if split:
                return await driver.run(infer_split(core, settings, inputs, outputs))
            return await driver.run(infer(core, settings, inputs, outputs))
        except BaseException:
            core.tally.failed()
            raise

    async def _prepare(
        self, settings: CallSettings, inputs: Mapping[str, InputDescription], outputs: Outputs, timeout_s: float
    ) -> AsyncPreparedCall:
        driver, core = self._open()
        call = await driver.run(prepare(core, settings, inputs, outputs))
        return AsyncPreparedCall(core, call, timeout_s, driver)

    async def _ask(self, timeout_s: float | None, call: ServerCall[P, T], *named: P.args, **more: P.kwargs) -> T:
        deadline = time.monotonic() + self._settings.patience_s(timeout_s)
        driver, core = self._open()
        return await driver.run(call(core.codec, deadline, *named, **more))

    def _open(self) -> tuple[AsyncioDriver, Core]:
        if self._is_closed:
            raise ClosedError("this client")
        if self._memory.pool.is_forked:
            raise ForkedError("this client")
        loop = asyncio.get_running_loop()
        if self._opened is None:
            transport = connect_async(self._settings.url, self._settings.tls)
            core = Core(transport.codec, transport.host, self._memory, self._settings.inline_bytes)
            self._opened = AsyncioDriver(transport), core
            self._unclosed = Unclosed(self._origin, _CLOSE_OR_WITH, core.rest_at_server)
            self._loop = loop
        elif self._loop is not loop:
            raise CallerError("this client belongs to another event loop; make one client in each loop")
        return self._opened
