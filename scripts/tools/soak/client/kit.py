"""Every workload of a client process has these: its connections to the server, its dice, its checks and its counts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shm_backend_utils.client import AsyncShmClient, PoolOptions, PreparedCall, Result, ShmClient
from shm_backend_utils.client.prepared import AsyncPreparedCall
from shm_backend_utils.memory.managed import RegionKind

from .models import LARGEST_BYTES, Array, HeldViews, Noise, Request, is_right
from .process import PHASE, VERIFIED, Phase
from .tally import HANGS, WRONG, Tally

MAX_BYTES: Final = 32 << 20
"""All clients together must not fill the soak's small /dev/shm."""
POOLS: Final = (
    PoolOptions(max_bytes=MAX_BYTES),
    PoolOptions(max_bytes=MAX_BYTES, idle_s=0),  # models fetch its regions all the time
    PoolOptions(max_bytes=MAX_BYTES, region="system"),
)
CALLED: Final = ("identity", "multiply", "halves", "rows")

CALL_TIMEOUT_S: Final = 15.0
LONGEST_HELD: Final = 40


class OnLoop:
    """An AsyncShmClient, or an object that it gave, with the methods of those for threads."""

    def __init__(self, of: Any, wait_for: Callable[[Awaitable[Any]], Any]) -> None:
        self.of = of
        self._wait_for = wait_for

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
        return functools.partial(self._call, found) if callable(found) else found

    def result(self) -> Result:
        result: Result = self._wait_for(self.of)
        return result

    def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        async def call() -> Any:
            made = method(*arguments, **named)
            return await made if inspect.iscoroutine(made) else made

        made = self._wait_for(call())
        if isinstance(made, AsyncGenerator):
            return self._iterate(made)
        return OnLoop(made, self._wait_for) if isinstance(made, asyncio.Task | AsyncPreparedCall) else made

    def _iterate(self, results: AsyncGenerator[Result, None]) -> Iterator[Result]:
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self._wait_for(results.__anext__())
        finally:
            self._wait_for(results.aclose())


class Connection:
    """One client over one protocol; it connects when it is first used, and again when it was closed."""

    def __init__(self, kind: str, protocol: str, url: str, pool: PoolOptions) -> None:
        self.kind = kind  # ``"ShmClient"`` or ``"AsyncShmClient"``
        self.protocol = protocol  # ``"gRPC"`` or ``"HTTP"``
        self._url = url
        self._pool = pool
        self._caller: ShmClient | OnLoop | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # of tasks whose results nobody asked for, for example
        self._waiting: asyncio.Future[Any] | None = None

    @property
    def caller(self) -> ShmClient | OnLoop:
        if self._caller is None:
            self._caller = self._connect()
        return self._caller

    @property
    def client(self) -> Any:
        return self.caller.of if isinstance(self.caller, OnLoop) else self.caller

    def has_sealed_memory(self, model: str) -> bool:
        known = self.client._core.known.get((model, ""))
        return bool(known and known.kind is RegionKind.SEALED)

    def quarantined(self) -> int:
        return 0 if self._caller is None else self._caller.stats().quarantined

    def interrupt(self) -> bool | None:
        """Cancel what is waited for; return whether anything was, or None for a client in which a signal may raise."""
        if not isinstance(self._caller, OnLoop):
            return None
        if self._waiting is not None:
            self._loop.call_soon_threadsafe(self._waiting.cancel)
        return self._waiting is not None

    def forget(self) -> None:
        self._caller = None

    def close(self) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.close()

    def _connect(self) -> ShmClient | OnLoop:
        options: dict[str, Any] = {"timeout_s": CALL_TIMEOUT_S, "path": "direct", "pool": self._pool}
        if self.kind == "ShmClient":
            return ShmClient(self._url, **options)
        return OnLoop(self._wait_for(AsyncShmClient(self._url, **options).__aenter__()), self._wait_for)

    def _wait_for(self, awaitable: Awaitable[Any]) -> Any:
        self._waiting = asyncio.ensure_future(awaitable, loop=self._loop)
        try:
            return self._loop.run_until_complete(self._waiting)
        finally:
            self._waiting = None


class Kit:
    def __init__(self, urls: Mapping[str, str], seed: int, page: memoryview) -> None:
        self.urls = urls  # by protocol
        self.chance = random.Random(seed)
        self.connections = [
            Connection(kind, protocol, url, self.chance.choice(POOLS))
            for kind in ("ShmClient", "AsyncShmClient")
            for protocol, url in urls.items()
        ]
        self.noise = Noise(seed)
        self.tally = Tally()
        self._page = page
        self._held = HeldViews(4)
        self._last_shapes: dict[str, tuple[int, ...]] = {}

    def enter(self, phase: Phase) -> None:
        self._page[PHASE] = phase

    def request(self, names: Sequence[str] = CALLED, most: int = LARGEST_BYTES) -> Request:
        request = Request.random(self.chance.choice(names), self.noise, self.chance, most)
        return replace(request, room=self.room(request.sink, request.payload.nbytes))

    def room(self, name: str, byte_size: int) -> dict[str, int] | None:
        """Say how large an output is, say too little, or leave it to be learned."""
        share = self.chance.random()
        if share < 0.1:
            return {name: max(byte_size // 2, 1)}
        return {name: byte_size} if share < 0.8 else None

    def infer(self, connection: Connection, request: Request, way: str = "infer", **named: Any) -> None:
        self.enter(Phase.IN_FLIGHT)
        with self.bounded(way):
            result = connection.caller.infer(*request.inputs, **{**request.options, **named})
        self.pass_call(self.check(connection, request, result, way))

    def prepared(self, connection: Connection, request: Request) -> PreparedCall | OnLoop:
        with self.bounded("prepare"):
            return connection.caller.prepare(*request.layout, **request.options)

    @contextlib.contextmanager
    def bounded(self, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Iterator[None]:
        """Count the call in this block if it takes a second longer than its timeout."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            if took > timeout_s + 1.0:
                self.tally.add(HANGS, f"{what}: {took:.1f} s of {timeout_s:g} s")

    def check(self, connection: Connection, request: Request, result: Result, way: str) -> Array:
        """Check a result, and count it and what the call was like; return the output."""
        self.enter(Phase.READING)
        model, said, view = request.model, request.said, result[request.sink]
        is_direct, is_sealed = result.path == "direct", connection.has_sealed_memory(model)
        shape = request.payload.shape
        was_like = {
            "overflows": result.overflowed,
            "parameters": said.parameters.keys() - {"sleep_ms", "copies"},
            "headers": said.headers,
            "small calls": result.path == "inline",
            "sealed memory": is_direct and is_sealed,
            "memory in /dev/shm": is_direct and not is_sealed,
            "forward": model == "relay",
            "varying shapes": self._last_shapes.get(model, shape) != shape,
        }
        self._last_shapes[model] = shape
        self.tally.add("paths", f"{result.path}, overflowed" if result.overflowed else result.path)
        self.checked(is_right(view, request.expected), connection.kind, connection.protocol, way)
        for word, is_so in was_like.items():
            if is_so:
                self.tally.add("done", word)
        return view

    def checked(self, is_right: bool, *words: str) -> None:
        name = ", ".join(words)
        self.tally.add("requests", name)
        if not is_right:
            self.tally.add(WRONG, f"a result, {name}")
            return
        self._page[VERIFIED] += 1
        for word in words:
            self.tally.add("done", word)

    def pass_call(self, view: Array | None = None, count: int = 1) -> None:
        """Check what is held after this call, or so many; maybe hold a view of which nobody writes over the memory."""
        self.tally.add(WRONG, "a view that was held", self._held.pass_calls(count))
        if view is not None and self.chance.random() < 0.3:
            self._held.hold(view, self.chance.randint(1, LONGEST_HELD))
