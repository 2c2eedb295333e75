"""Every workload of a client process has these: its connections to the server, its dice, its checks and its counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Final, TypeVar

import numpy.typing as npt

from shm_backend_utils.client import AsyncShmClient, Result, ShmClient
from shm_backend_utils.client.explanation import ClientStats
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName

from .models import HeldViews, Model, Noise, Said, is_right
from .process import Board, Phase, Tally

T = TypeVar("T")
MAX_BYTES: Final = 32 << 20
"""All clients together are not to fill the soak's small /dev/shm by themselves."""
REGIONS: Final[tuple[RegionName, ...]] = ("auto", "auto", "system")
"""What memory connections have: sealed by default, and in ``/dev/shm`` for every third."""
PROTOCOLS: Final = {"gRPC": "grpc", "HTTP": "http"}

CALL_TIMEOUT_S: Final = 15.0
GRACE_S: Final = 1.0
"""How much longer than its timeout a call may take."""
MOST_HELD_VIEWS: Final = 4
SLEEPS_MS: Final = (*[0] * 38, 1, 40)
SHARE_OF_HINTS: Final = 0.8
SHARE_OF_SMALL_HINTS: Final = 0.1
SHARE_HELD: Final = 0.3


class OnLoop:
    """An AsyncShmClient on an event loop of its own, which runs while somebody waits for a call."""

    def __init__(self, url: str, **named: Any) -> None:
        self._waiting: asyncio.Task[Any] | asyncio.Future[Any] | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # of tasks whose results nobody asked for, for example
        self.client = AsyncShmClient(url, **named)
        try:
            self.wait_for(self.client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    def infer(self, model: str, inputs: Any, **named: Any) -> Result:
        """As of ShmClient."""
        return self.wait_for(self.client.infer(model, inputs, **named))

    def submit(self, model: str, inputs: Any, **named: Any) -> Task:
        """As of ShmClient; the task goes on when somebody waits for this one, or for another."""

        async def begin() -> asyncio.Task[Result]:
            return self.client.submit(model, inputs, **named)

        return Task(self, self.wait_for(begin()))

    def prepare(self, model: str, inputs: Any, **named: Any) -> OnLoopCall:
        """As of ShmClient."""
        return OnLoopCall(self, self.wait_for(self.client.prepare(model, inputs, **named)))

    def stream(self, model: str, inputs: Any, **named: Any) -> Iterator[Result]:
        """As of ShmClient."""
        frames = self.client.stream(model, inputs, **named)
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self.wait_for(frames.__anext__())
        finally:
            self.wait_for(frames.aclose())

    def stats(self) -> ClientStats:
        """As of ShmClient."""

        async def ask() -> ClientStats:
            return self.client.stats()

        return self.wait_for(ask())

    def close(self) -> None:
        """As of ShmClient."""
        if not self._loop.is_closed():
            self.wait_for(self.client.close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Run the loop until something is done."""
        task = self._waiting = asyncio.ensure_future(awaitable, loop=self._loop)
        try:
            value: T = self._loop.run_until_complete(task)
            return value
        finally:
            self._waiting = None

    def cancel(self) -> bool:
        """Cancel what is waited for, from a signal's handler, as asyncio.run does; return whether there is such.

        An exception that is raised in the middle of asyncio's own code leaves tasks that nobody will ever wake.
        """
        waiting = self._waiting
        if waiting is None:
            return False
        self._loop.call_soon_threadsafe(waiting.cancel)
        return True


class Task:
    """What :meth:`OnLoop.submit` returns."""

    def __init__(self, owner: OnLoop, task: asyncio.Task[Result]) -> None:
        self._owner = owner
        self._task = task

    def result(self) -> Result:
        """Wait for the result."""
        return self._owner.wait_for(self._task)


class OnLoopCall:
    """What :meth:`OnLoop.prepare` returns: an AsyncPreparedCall."""

    def __init__(self, owner: OnLoop, call: Any) -> None:
        self._owner = owner
        self._call = call

    @property
    def inputs(self) -> Any:
        """The arrays to be filled."""
        return self._call.inputs

    def infer(self, *, timeout_s: float | None = None) -> Result:
        """Run the model."""
        result: Result = self._owner.wait_for(self._call.infer(timeout_s=timeout_s))
        return result

    def close(self) -> None:
        """Give the memory back."""
        self._call.close()


Caller = ShmClient | OnLoop


class Connection:
    """One client over one protocol; it connects when it is first used, and again when it was closed."""

    def __init__(self, kind: str, protocol: str, url: str, timeout_s: float, region: RegionName = "auto") -> None:
        self.kind = kind  # ``"ShmClient"`` or ``"AsyncShmClient"``
        self.protocol = protocol  # ``"gRPC"`` or ``"HTTP"``
        self.is_lost = False  # whether the last call found no server
        self._url = url
        self._timeout_s = timeout_s
        self._pool = PoolOptions(max_bytes=MAX_BYTES, region=region)
        self._caller: Caller | None = None

    @property
    def client(self) -> ShmClient | AsyncShmClient:
        """The client itself."""
        return self.caller.client if isinstance(self.caller, OnLoop) else self.caller

    @property
    def caller(self) -> Caller:
        """The client."""
        return self._caller or self.connect()

    def connect(self) -> Caller:
        """Make the client, if there is none."""
        if self._caller is None:
            make: type[Caller] = ShmClient if self.kind == "ShmClient" else OnLoop
            self._caller = make(self._url, timeout_s=self._timeout_s, path="direct", pool=self._pool)
        return self._caller

    def has_sealed_memory(self, model: str) -> bool:
        """Return whether calls of a model take sealed memory."""
        core = self.client._core
        known = core and core.known.get((model, ""))
        return bool(known and known.kind is RegionKind.SEALED)

    def quarantined(self) -> int:
        """Return how many slots wait for a model."""
        return 0 if self._caller is None else self._caller.stats().quarantined

    def interrupt(self) -> bool | None:
        """Interrupt a call as a user of its client does; None where an exception may be raised at any point.

        Return else whether there was a call to be cancelled.
        """
        return self._caller.cancel() if isinstance(self._caller, OnLoop) else None

    def forget(self) -> None:
        """Let go of the client without closing it."""
        self._caller = None

    def close(self) -> None:
        """Close the client, if there is one."""
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.close()


class Connections:
    """All of a process."""

    def __init__(self, urls: dict[str, str], timeout_s: float, chance: random.Random) -> None:
        self.all = [
            Connection(kind, protocol, urls[key], timeout_s, chance.choice(REGIONS))
            for kind in ("ShmClient", "AsyncShmClient")
            for protocol, key in PROTOCOLS.items()
        ]

    def quarantined(self) -> int:
        """Return how many slots wait for a model."""
        return sum(connection.quarantined() for connection in self.all)

    def close(self) -> None:
        """Close every client."""
        for connection in self.all:
            connection.close()


class Kit:
    """Of one client process."""

    def __init__(self, urls: dict[str, str], seed: int, board: Board) -> None:
        self.urls = urls  # ``"grpc"`` and ``"http"``
        self.chance = random.Random(seed)
        self.connections = Connections(urls, CALL_TIMEOUT_S, self.chance)
        self.noise = Noise(seed)
        self.board = board
        self.tally = Tally()
        self.held = HeldViews(MOST_HELD_VIEWS)
        self._last_shapes: dict[str, tuple[int, ...]] = {}

    def said(self, model: Model) -> Said:
        """Return what a request says beside its tensors."""
        return Said.random(self.chance, self.chance.choice(SLEEPS_MS)) if model.reads_parameters else Said()

    def room(self, name: str, byte_size: int) -> dict[str, int] | None:
        """Say how large an output is, say too little, or leave it to be learned."""
        share = self.chance.random()
        if share < SHARE_OF_SMALL_HINTS:
            return {name: max(byte_size // 2, 1)}
        return {name: byte_size} if share < SHARE_OF_HINTS else None

    @contextlib.contextmanager
    def bounded(self, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Iterator[None]:
        """Count the call in this block if it takes a second longer than its timeout."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            if took > timeout_s + GRACE_S:
                self.tally.add("late calls", f"{what}: {took:.1f} s of {timeout_s:g} s")

    def check(
        self, connection: Connection, model: Model, payload: npt.NDArray[Any], said: Said, result: Result, way: str
    ) -> npt.NDArray[Any]:
        """Check a result, and count it and what the call was like; return the output."""
        self.board.phase = Phase.READING
        view = result[model.sink]
        self.tally.add("paths", f"{result.path}, overflowed" if result.overflowed else result.path)
        if not self.is_checked(connection, way, is_right(view, model.expected(payload, said))):
            return view
        words = ["overflows"] if result.overflowed else []
        words += ["parameters"] if said.has_parameters else []
        words += ["headers"] if said.headers else []
        words += ["small calls"] if result.path == "inline" else []
        if result.path == "direct":
            words += ["sealed memory" if connection.has_sealed_memory(model.name) else "memory in /dev/shm"]
        words += ["forward"] if model.name == "relay" else []
        words += ["varying shapes"] if self._last_shapes.get(model.name, payload.shape) != payload.shape else []
        self._last_shapes[model.name] = payload.shape
        for word in words:
            self.tally.add("done", word)
        return view

    def is_checked(self, connection: Connection, way: str, is_right: bool) -> bool:
        """Count an answer that was checked; return whether it was right."""
        self.checked(f"{connection.kind}, {connection.protocol}, {way}", is_right)
        if connection.is_lost:
            connection.is_lost = False
            self.tally.add("recoveries", f"{connection.kind}, {connection.protocol}")
        if is_right:
            for word in (connection.kind, connection.protocol, way):
                self.tally.add("done", word)
        return is_right

    def checked(self, name: str, is_right: bool) -> None:
        """Count an answer under any name."""
        self.tally.add("requests", name)
        if is_right:
            self.board.verified += 1
        else:
            self.tally.add("wrong bytes", f"a result, {name}")

    def pass_call(self, view: npt.NDArray[Any] | None = None) -> None:
        """Check what is held, and maybe hold a view of which nobody writes over the memory."""
        self.tally.add("wrong bytes", "a view that was held", self.held.pass_call())
        if view is not None and self.chance.random() < SHARE_HELD:
            self.held.hold(view, self.chance.randint(1, 40))
