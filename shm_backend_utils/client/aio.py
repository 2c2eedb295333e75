"""AsyncShmClient: the same client for tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import CallerError, ClosedError
from ..memory.cuda.memory import CudaAccess
from .call import AsyncPreparedCall
from .connect import connect_async
from .demand import Demand, Outputs
from .engine import Engine
from .errors import ForkedError
from .explanation import Explanation
from .options import RequestOptions, Tls
from .paths import PathName
from .plan import InputDescription
from .pool_options import PoolOptions
from .result import Result
from .runtime import AsyncioRuntime
from .split import infer_split
from .stats import ClientStats
from .terms import Terms

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncShmClient"]


class AsyncShmClient:
    """As :class:`ShmClient`, with ``await``. Belongs to the event loop of its first call.

    It connects at the first call, or when its ``async with`` block is entered, which also makes sure that there is a
    server.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        path: PathName = "auto",
        pool: PoolOptions | None = None,
        tls: Tls | None = None,
        cuda: CudaAccess | None = None,
    ) -> None:
        self._terms = Terms(url, timeout_s, path, pool, tls, cuda)
        self._terms.memory.end_with(self)
        self._engine: Engine | None = None
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
        **options: Unpack[RequestOptions],
    ) -> Coroutine[Any, Any, Result]:
        """Run a model. As :meth:`ShmClient.infer`; the time runs from the call, not from the first ``await``.

        Large copies are made in a thread, so that other tasks go on; the inputs must not change before the answer.
        """
        demand = self._terms.demand("infer", model, path, timeout_s, options)
        return self._infer(demand, inputs, outputs, split)

    def submit(self, model: str, inputs: Mapping[str, Any], **named: Any) -> asyncio.Task[Result]:
        """As :meth:`infer`, in a task of its own."""
        return asyncio.ensure_future(self.infer(model, inputs, **named))

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, InputDescription],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        **options: Unpack[RequestOptions],
    ) -> Coroutine[Any, Any, AsyncPreparedCall]:
        """Return a call whose inputs are to be filled in place. As :meth:`ShmClient.prepare`.

        ``with await client.prepare(...) as call: ... await call.infer()``
        """
        demand = self._terms.demand("prepare", model, path, timeout_s, options)
        return self._prepare(demand, inputs, outputs, self._terms.patience_s(timeout_s))

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        frames: int = 4,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Result, None]:
        """Yield the responses of a decoupled model as they come. As :meth:`ShmClient.stream`."""
        demand = self._terms.demand("stream", model, path, timeout_s, options)
        results = self._open_engine().stream(demand, inputs, outputs, frames, self._terms.patience_s(timeout_s))
        try:
            while True:
                try:
                    yield await results.__anext__()  # held by no variable here: the user's alone shall hold it
                except StopAsyncIteration:
                    return
        finally:
            await results.aclose()

    async def explain(self, model: str, *, model_version: str = "") -> Explanation:
        """Check anew which path calls of a model take, and why. Printed, it is a table."""
        return await self._open_engine().explain(model, model_version, self._terms.timeout_s)

    def stats(self) -> ClientStats:
        """Return what this client has done so far."""
        return self._open_engine().stats()

    async def close(self) -> None:
        """Close the connection and remove the shared memory. Arrays of results stay valid. Twice is fine."""
        self._is_closed = True
        engine, self._engine = self._engine, None
        if engine is not None and not self._terms.memory.pool.is_a_forks:
            await engine.close()
        self._terms.memory.end()

    async def __aenter__(self) -> AsyncShmClient:
        try:
            await self._open_engine().check_server_answers(self._terms.timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _infer(self, demand: Demand, inputs: Mapping[str, Any], outputs: Outputs, split: bool) -> Result:
        engine = self._open_engine()
        if not split:
            return await engine.infer(demand, inputs, outputs)
        with engine.tally.failures():
            return await infer_split(engine, demand, inputs, outputs)

    async def _prepare(
        self,
        demand: Demand,
        inputs: Mapping[str, InputDescription],
        outputs: Outputs,
        timeout_s: float,
    ) -> AsyncPreparedCall:
        engine = self._open_engine()
        return AsyncPreparedCall(engine, await engine.prepare(demand, inputs, outputs), timeout_s)

    def _open_engine(self) -> Engine:
        if self._is_closed:
            raise ClosedError("this client")
        if self._terms.memory.pool.is_a_forks:
            raise ForkedError("this client")
        loop = asyncio.get_running_loop()
        if self._engine is None:
            transport = connect_async(self._terms.url, self._terms.tls)
            self._engine = Engine(transport, AsyncioRuntime(), self._terms.memory)
            self._loop = loop
        elif self._loop is not loop:
            raise CallerError("this client belongs to another event loop; make one client in each loop")
        return self._engine
