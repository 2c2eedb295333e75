"""No call takes longer than its timeout, whatever it waits for; and an answer must have come by a moment."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, DeadlineExceededError, PoolOptions, ShmClient, aio, client
from shm_backend_utils.client.client import SubmittedCalls
from shm_backend_utils.client.errors import deadline_exceeded
from shm_backend_utils.client.paths import choice
from shm_backend_utils.memory import segment, shared_file
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import FakeTransport

TIMEOUT_S = 0.5
SLACK_S = 0.3
FOREVER_S = 3600.0
X = np.arange(6, dtype=np.float32)
LARGE = np.zeros(2**21, np.float32)  # whose copy another thread makes
PROCEDURES = ["ModelConfig", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "ModelInfer"]


class SlowTransport(FakeTransport):
    def __init__(self, server: FakeServer) -> None:
        super().__init__(server, "grpc")
        self.delays_s: dict[str, float] = {}

    def send(self, message: Any, timeout_s: float) -> Any:
        delay_s = self.delays_s.get(message.procedure, 0.0)
        time.sleep(min(delay_s, timeout_s))
        if delay_s > timeout_s:
            raise deadline_exceeded()
        return super().send(message, timeout_s)


class AsyncSlowTransport:
    """The same for tasks, which wait in threads of its own."""

    def __init__(self, inner: SlowTransport) -> None:
        self._inner = inner
        self._threads = concurrent.futures.ThreadPoolExecutor(64)
        self.codec, self.host, self.address = inner.codec, inner.host, inner.address

    async def send(self, message: Any, timeout_s: float) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._inner.send, message, timeout_s)

    async def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTransport]:
    with FakeServer(config("m"), config("batched", max_batch_size=2)) as server:
        made = SlowTransport(server)
        monkeypatch.setattr(client, "connect", lambda *_: made)
        monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncSlowTransport(made))
        yield made


@contextlib.contextmanager
def a_client(transport: SlowTransport, **named: Any) -> Iterator[ShmClient]:
    with ShmClient("localhost:8001", **named) as made:
        yield made
        transport.delays_s.clear()


@contextlib.asynccontextmanager
async def an_async_client(transport: SlowTransport) -> AsyncGenerator[AsyncShmClient, None]:
    async with AsyncShmClient("localhost:8001") as made:
        yield made
        transport.delays_s.clear()


def in_time(call: Callable[[], object]) -> bool:
    begin = time.monotonic()
    try:
        call()
    except TimeoutError:
        return False
    finally:
        assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
    return True


async def in_time_async(call: Awaitable[object]) -> bool:
    begin = time.monotonic()
    try:
        await call
    except TimeoutError:
        return False
    finally:
        assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
    return True


def infer(made: ShmClient, x: Any = X, timeout_s: float = TIMEOUT_S, **more: Any) -> Any:
    return made.infer("m", {"IN0": x}, timeout_s=timeout_s, **more)


def infer_rows(made: ShmClient, x: Any, timeout_s: float = TIMEOUT_S, **more: Any) -> Any:
    return made.infer("batched", {"IN0": x}, timeout_s=timeout_s, split=True, **more)


CALLS: dict[str, Callable[[ShmClient, Any], object]] = {
    "infer": lambda made, path: infer(made, path=path),
    "submit": lambda made, path: made.submit("m", {"IN0": X}, path=path, timeout_s=TIMEOUT_S).result(),
    "split": lambda made, path: infer_rows(made, np.zeros((5, 3), np.float32), path=path),
    "prepare": lambda made, path: made.prepare(
        "m", {"IN0": ((6,), np.float32)}, path=path, timeout_s=TIMEOUT_S
    ).close(),
}


@pytest.mark.parametrize(
    ("call", "path", "delay_s"),
    [("infer", "triton-shm", 0.8 * TIMEOUT_S), ("infer", "direct", FOREVER_S)]
    + [(call, "triton-shm", FOREVER_S) for call in CALLS],
)
def test_a_call_ends_in_time_whatever_is_slow(call: str, path: str, delay_s: float, transport: SlowTransport) -> None:
    for procedure in PROCEDURES:
        with a_client(transport) as made:
            transport.delays_s[procedure] = delay_s
            in_time(lambda: CALLS[call](made, path))


@pytest.mark.parametrize("call", CALLS)
def test_all_requests_share_a_timeout(call: str, transport: SlowTransport) -> None:
    with a_client(transport) as made:
        transport.delays_s = dict.fromkeys(PROCEDURES, 0.4 * TIMEOUT_S)
        assert not in_time(lambda: CALLS[call](made, "triton-shm"))


def test_a_host_name_lookup_keeps_no_task_waiting(transport: SlowTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(choice, "is_this_machine", lambda _: told.wait(10 * TIMEOUT_S))

    async def call() -> None:
        async with an_async_client(transport) as made:
            begin = time.monotonic()
            asked = asyncio.ensure_future(made.infer("m", {"IN0": X}, timeout_s=TIMEOUT_S))
            await asyncio.sleep(0.1 * TIMEOUT_S)
            assert time.monotonic() - begin < TIMEOUT_S
            with pytest.raises(DeadlineExceededError, match="host name was being looked up"):
                await asked
            told.set()

    asyncio.run(call())


def test_regions_to_unregister_delay_no_call(transport: SlowTransport) -> None:
    with a_client(transport, pool=PoolOptions(max_bytes=2**20, idle_s=0.0)) as made:
        results = [made.infer("m", {"IN0": np.zeros(n, np.float32)}, path="triton-shm") for n in range(1, 9)]
        del results
        made._memory.pool.drop_idle()
        transport.delays_s["SystemSharedMemoryUnregister"] = 0.3 * TIMEOUT_S
        in_time(lambda: infer(made, path="triton-shm"))


def test_a_client_closes_in_time_whatever_is_slow(transport: SlowTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shm_backend_utils.client.core._CLOSING_S", TIMEOUT_S)
    made = ShmClient("localhost:8001")
    results = [made.infer("m", {"IN0": np.zeros(n, np.float32)}, path="triton-shm") for n in range(1, 9)]
    del results
    transport.delays_s["SystemSharedMemoryUnregister"] = 0.3 * TIMEOUT_S
    assert in_time(made.close)


def test_a_split_call_waits_for_threads_in_time(transport: SlowTransport) -> None:
    rows = np.zeros((40, 3), np.float32)
    with a_client(transport) as made:
        infer_rows(made, rows).release()
        transport.delays_s["ModelInfer"] = 3 * TIMEOUT_S
        others = [threading.Thread(target=infer_rows, args=[made, rows, 10]) for _ in range(2)]
        for other in others:
            other.start()
        time.sleep(0.2)
        assert not in_time(lambda: infer_rows(made, rows))
        transport.delays_s.clear()
        for other in others:
            other.join()


def test_a_submitted_call_waits_for_threads_in_time(transport: SlowTransport) -> None:
    with a_client(transport) as made:
        made.infer("m", {"IN0": X}).release()
        transport.delays_s["ModelInfer"] = 3 * TIMEOUT_S
        others = [made.submit("m", {"IN0": X}, timeout_s=10) for _ in range(32)]
        ready: list[float] = []
        begin = time.monotonic()
        future = made.submit("m", {"IN0": X}, timeout_s=TIMEOUT_S)
        future.add_done_callback(lambda _: ready.append(time.monotonic() - begin))
        with pytest.raises(DeadlineExceededError):
            future.result()
        assert ready[0] < TIMEOUT_S + SLACK_S
        assert made.stats().slots_held == len(others), "it has given its memory back"
        del future
        for other in others:
            other.result().release()


def test_a_call_that_a_callback_submits_waits_for_no_thread_longer_than_it_may() -> None:
    """Callbacks run in the threads of the calls: where all of them wait for further calls, nobody makes those."""
    calls, go, ended = SubmittedCalls(), threading.Event(), threading.Semaphore(0)
    late: list[BaseException] = []

    def submit_another(_: object) -> None:
        try:
            calls.submit(never, time.monotonic() + TIMEOUT_S).result(30)
        except DeadlineExceededError as error:  # not all: who is late first gives his thread to one that is not
            late.append(error)
        ended.release()

    def never() -> Any:
        go.wait(30)

    futures = [calls.submit(never, time.monotonic() + 30) for _ in range(32)]
    for future in futures:
        future.add_done_callback(submit_another)
    go.set()
    for _ in futures:
        assert ended.acquire(timeout=TIMEOUT_S + 2)
    assert late
    calls.close()


@pytest.mark.parametrize(("array", "part"), [(np.zeros(2**12, np.float32), 1.1), (LARGE, 0.5)])  # one piece, and more
def test_new_memory_is_entered_into_page_tables_no_longer_than_a_call_may_take(
    array: np.ndarray[Any, Any], part: float, transport: SlowTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is as slow as that is simulated: each piece takes so much of what the call may take."""

    class SlowClock:
        begin = time.monotonic()
        looks = 0

        def monotonic(self) -> float:
            self.looks += 1
            return time.monotonic() + self.looks * TIMEOUT_S * part

    clock = SlowClock()
    for module in (shared_file, segment):
        monkeypatch.setattr(module, "time", clock)
    with a_client(transport) as made:
        infer(made, timeout_s=60).release()
        with pytest.raises(DeadlineExceededError, match="its memory was being made; its request was not sent"):
            infer(made, array)


def test_a_task_waits_for_no_thread_for_too_long(transport: SlowTransport) -> None:
    go = threading.Event()

    def busy(threads: concurrent.futures.Executor) -> None:
        for _ in range(64):
            threads.submit(go.wait, 30)

    async def main() -> None:
        loops = concurrent.futures.ThreadPoolExecutor(4)
        asyncio.get_running_loop().set_default_executor(loops)
        try:
            async with an_async_client(transport) as made:
                busy(loops)
                for array in (X, LARGE):
                    assert await in_time_async(made.infer("m", {"IN0": array}, timeout_s=TIMEOUT_S))
                driver, _ = made._open()
                busy(driver._threads)
                assert not await in_time_async(made.infer("m", {"IN0": LARGE}, timeout_s=TIMEOUT_S))
                go.set()
                (await made.infer("m", {"IN0": LARGE})).release()
                assert made.stats().slots_held == 0
        finally:
            go.set()

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.8 * TIMEOUT_S, FOREVER_S])
def test_a_tasks_call_ends_in_time(delay_s: float, transport: SlowTransport) -> None:
    async def main() -> None:
        for procedure in PROCEDURES:
            async with an_async_client(transport) as made:
                transport.delays_s[procedure] = delay_s
                await in_time_async(made.infer("m", {"IN0": X}, path="triton-shm", timeout_s=TIMEOUT_S))

    asyncio.run(main())
