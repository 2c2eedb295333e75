"""What a client holds after a call, and is held of it: nothing, however the call ended, and whoever keeps its error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import process
from shm_backend_utils.client import DeadlineExceededError, InferenceError, ServerUnavailableError, ShmClient, streams
from shm_backend_utils.client.paths import direct
from shm_backend_utils.client.result import Result
from shm_backend_utils.client.streams import DirectStream, open_stream
from shm_backend_utils.errors import CallerError, PeerError, SlotInUseError, refusal
from shm_backend_utils.memory.pool.slot import Slot
from shm_backend_utils.protocol import results
from tests.e2e.eventually import eventually
from tests.unit.fake_server import Arrays, FakeServer, Order, config, doubled
from tests.unit.fake_wires import async_client_of, client_of

X = np.arange(6, dtype=np.float32)
LONG_S = 30.0


def answers(order: Order, inputs: Arrays) -> Any:
    return [doubled(order, inputs)] * 2 if order.model == "stream" else doubled(order, inputs)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    batches = config("batches", max_batch_size=4, dims="3")
    decoupled = config("stream", model_transaction_policy={"decoupled": True})
    with FakeServer(config("m"), batches, decoupled, compute=answers) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server) as client:
        for path in ("direct", "triton-shm", "inline"):
            client.infer("m", {"IN0": X}, path=path)
        yield client


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def fail_making_arrays(server: FakeServer, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(places: Any, memory: Any, *_: Any, **__: Any) -> Result:
        kept = memory[10:]
        raise type(error)(str(error)) from ValueError(kept.nbytes)

    for module in (direct, streams):
        patch.setattr(module, "result_of", broken)


Failure = Callable[[FakeServer, pytest.MonkeyPatch, BaseException], None]
FAILURES: dict[str, Failure] = {
    "before": lambda server, patch, error: setattr(server, "before", raising(error)),
    "after": lambda server, patch, error: setattr(server, "after", raising(error)),
    "in the model": lambda server, patch, error: setattr(server, "compute", raising(InferenceError(str(error)))),
    "copying": lambda server, patch, error: patch.setattr(np, "copyto", raising(error)),
    "beginning": lambda server, patch, error: patch.setattr(Slot, "begin", raising(error)),
    "reading": lambda server, patch, error: patch.setattr(results, "decode", raising(error)),
    "making arrays": fail_making_arrays,
    "an output is missing": lambda server, patch, error: setattr(server, "compute", lambda order, inputs: {}),
}
ERRORS = [
    InferenceError("no", "StatusCode.INTERNAL"),
    DeadlineExceededError("late"),
    ServerUnavailableError("gone"),
    PeerError("odd"),
    KeyboardInterrupt("now"),
]


def infer(client: ShmClient) -> None:
    client.infer("m", {"IN0": X})


def prepare(client: ShmClient) -> None:
    with client.prepare("m", {"IN0": ((6,), np.float32)}) as call:
        call.infer()


CALLS: dict[str, Callable[[ShmClient], object]] = {
    "infer": infer,
    "submit": lambda client: client.submit("m", {"IN0": X}).result(LONG_S),
    "split": lambda client: client.infer("batches", {"IN0": np.ones((10, 3), np.float32)}, split=True),
    "prepare": prepare,
    "registered": lambda client: client.infer("m", {"IN0": X}, path="triton-shm"),
    "stream": lambda client: list(client.stream("stream", {"IN0": X})),
}
CASES = [("infer", where, error) for where in FAILURES for error in ERRORS]
CASES += [
    (call, where, ERRORS[(row + column) % len(ERRORS)])
    for row, call in enumerate(["submit", "split", "prepare", "registered"])
    for column, where in enumerate(FAILURES)
]
CASES += [("stream", where, PeerError("odd")) for where in ("reading", "making arrays")]


@pytest.mark.parametrize(("call", "where", "error"), CASES, ids=repr)
def test_an_error_that_somebody_keeps_keeps_no_slot(
    client: ShmClient, server: FakeServer, call: str, where: str, error: BaseException
) -> None:
    gc.disable()
    kept = None
    try:
        with pytest.MonkeyPatch.context() as patch:
            FAILURES[where](server, patch, error)
            try:
                CALLS[call](client)
            except BaseException as raised:
                kept = raised
        server.before = server.after = lambda order: None
        server.compute = answers
        assert client.stats().slots_held == 0, kept
        infer(client)
    finally:
        gc.enable()


def test_a_stream_that_is_closed_twice_leaves_the_next_one_alone_that_has_its_slot(client: ShmClient) -> None:
    core, settings = client._open_core(), client._settings.of_call("stream", "stream", "direct", None, {})
    first, second = (client._driver.run(open_stream(core, settings, {"IN0": X}, None, None, 30)).call for _ in range(2))
    first.message()
    first.close()
    second.close()
    assert isinstance(first, DirectStream)
    next_one = client._driver.run(open_stream(core, settings, {"IN0": X}, None, None, 30)).call
    next_one.message()
    assert isinstance(next_one, DirectStream)
    slot = next_one._slot
    before = slot.generation
    for closed in (first, second):
        closed.close()
    assert (slot.generation, slot.state) == (before, "sent")
    next_one.close()


def test_memory_of_a_closed_call_waits_for_the_model(client: ShmClient, server: FakeServer) -> None:
    executes, go = threading.Event(), threading.Event()

    def compute(_: Order, inputs: Arrays) -> Arrays:
        executes.set()
        go.wait(LONG_S)
        return {"OUT0": inputs["IN0"] * 2}

    server.compute = compute
    call = client.prepare("m", {"IN0": ((6,), np.float32)}, outputs={"OUT0": X.nbytes})
    call.inputs["IN0"][:] = X
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(call.infer)
        assert executes.wait(LONG_S)
        call.close()
        assert client.stats().slots_held == 1
        go.set()
        np.testing.assert_array_equal(under_way.result(LONG_S)["OUT0"], 2 * X)
        del under_way
    assert client.stats().slots_held == 0


def test_a_prepared_call_that_two_threads_use_at_once_says_so(client: ShmClient, server: FakeServer) -> None:
    executes, go = threading.Event(), threading.Event()

    def wait(_: Order) -> None:
        executes.set()
        go.wait(LONG_S)

    server.before = wait
    with client.prepare("m", {"IN0": ((6,), np.float32)}) as call, concurrent.futures.ThreadPoolExecutor(1) as thread:
        call.inputs["IN0"][:] = X
        first = thread.submit(call.infer)
        assert executes.wait(LONG_S)
        with pytest.raises(CallerError) as error:
            call.infer()
        go.set()
        assert str(error.value) == (
            "another thread or task is running this prepared call, which has memory for one request at a time; "
            "prepare one call for each thread or task"
        )
        np.testing.assert_array_equal(first.result(LONG_S)["OUT0"], 2 * X)
        np.testing.assert_array_equal(call.infer()["OUT0"], 2 * X)


def test_a_call_that_is_made_again_holds_nothing_of_its_attempts(client: ShmClient, server: FakeServer) -> None:
    held: list[int] = []

    def be_busy_twice(_: Order) -> None:
        held.append(client.stats().slots_held)
        if len(held) % 3:
            raise InferenceError(refusal(SlotInUseError("the slot is in use")))

    server.before = be_busy_twice
    gc.disable()
    try:
        infer(client)
        prepare(client)
        assert (held, client.stats().slots_held) == ([1] * 6, 0)
    finally:
        gc.enable()


def test_closing_waits_for_the_answer(client: ShmClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reclaim = Slot.reclaim

    def close_meanwhile(slot: Slot) -> bool:
        call.close()
        return reclaim(slot)

    with client.prepare("m", {"IN0": ((6,), np.float32)}) as call:
        call.inputs["IN0"][:] = X
        server.before = raising(DeadlineExceededError("late"))
        with pytest.raises(DeadlineExceededError):
            call.infer()
        server.before = lambda _: None
        monkeypatch.setattr(Slot, "reclaim", close_meanwhile)
        np.testing.assert_array_equal(call.infer()["OUT0"], 2 * X)


def test_a_submitted_call_keeps_no_array_of_the_users(client: ShmClient, server: FakeServer) -> None:
    go = threading.Event()
    server.before = lambda _: go.wait(LONG_S)
    first = [client.submit("m", {"IN0": X}) for _ in range(32)]
    mine = X.copy()
    kept = weakref.ref(mine)
    last = client.submit("m", {"IN0": mine})
    del mine
    assert kept() is None
    go.set()
    np.testing.assert_array_equal(last.result(LONG_S)["OUT0"], 2 * X)
    concurrent.futures.wait(first, LONG_S)


def held_by_this_process() -> list[int]:
    gc.collect()
    return [len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(process._OWNERS)]


def use_one(server: FakeServer, is_closed: bool) -> None:
    with client_of(server) as client:
        client.infer("m", {"IN0": X}, path="direct")  # the server keeps what a client registers and leaves
        if not is_closed:
            client.close = lambda: None  # type: ignore[method-assign]
    assert not is_closed or not list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*"))


@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")  # as an error, it would keep its client
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_hundred_clients_leave_nothing(server: FakeServer, is_closed: bool) -> None:
    for _ in range(5):
        use_one(server, is_closed)
    before = held_by_this_process()
    for _ in range(100):
        use_one(server, is_closed)
    eventually(lambda: all(now <= then + 2 for now, then in zip(held_by_this_process(), before, strict=True)))
    assert list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")) == []


def test_tasks_that_are_cancelled_anywhere_hold_nothing(server: FakeServer) -> None:
    async def main() -> None:
        async with async_client_of(server) as client:
            await client.infer("m", {"IN0": X})
            large = np.zeros(2**21, np.float32)  # copied in a thread
            for path in ("direct", "triton-shm", "inline"):
                for given in (X, large):
                    for steps in range(12):
                        task = client.submit("m", {"IN0": given}, path=path, outputs={"OUT0": given.nbytes})
                        for _ in range(steps):
                            await asyncio.sleep(0)
                        task.cancel()
                        await asyncio.wait([task])
                        if not task.cancelled():
                            np.testing.assert_array_equal(task.result()["OUT0"], given * 2)
                        del task
            for _ in range(500):
                stats = client.stats()
                if stats.slots_held == stats.quarantined == 0:
                    break
                await asyncio.sleep(0.01)
            assert (stats.slots_held, stats.quarantined) == (0, 0)
            np.testing.assert_array_equal((await client.infer("m", {"IN0": X}))["OUT0"], 2 * X)

    asyncio.run(main())
