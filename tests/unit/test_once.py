"""Many calls that find out the same thing at the same moment: one of them asks, and one undoes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import math
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, ServerUnavailableError, steps
from shm_backend_utils.client.errors import out_of_time
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.once import Once
from shm_backend_utils.client.paths.choice import PathChooser
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Pause, Steps, Wait
from shm_backend_utils.client.transports.grpc.codec import GrpcCodec
from shm_backend_utils.memory.managed import RegionKind
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import FakeTransport, async_client_of, client_of
from tests.unit.side_by_side import side_by_side

CALLS, THREADS = 300, 200
X = np.arange(6, dtype=np.float32)
PAUSE = Pause(1.0)


def searching() -> Steps[str]:
    return (yield PAUSE)  # type: ignore[no-any-return]


@pytest.fixture
def callers() -> list[Steps[str]]:
    once = Once()
    return [once.find("it", searching, time.monotonic() + 60) for _ in range(3)]


def future_in(step: Any) -> concurrent.futures.Future[Any]:
    assert isinstance(step, Wait)
    return step.future


def outcome_of(call: Steps[Any], sent: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        call.send(sent)
    return end.value.value


@pytest.mark.parametrize("error", [out_of_time("it waited"), KeyboardInterrupt(), asyncio.CancelledError(), None])
def test_where_who_searches_is_broken_off_another_does(callers: list[Steps[str]], error: BaseException | None) -> None:
    first, second, third = callers
    next(first)
    waits = future_in(next(second)), future_in(next(third))
    if error is None:
        first.close()
    else:
        with pytest.raises(type(error)):
            first.throw(error)
    assert second.send(waits[0].result(0)) is PAUSE
    found = future_in(third.send(waits[1].result(0)))
    assert outcome_of(second, "found") == "found"
    assert outcome_of(third, found.result(0)) == "found"


def test_a_call_waits_no_longer_than_its_own_deadline(callers: list[Steps[str]]) -> None:
    first, second, _ = callers
    next(first)
    next(second)
    with pytest.raises(DeadlineExceededError, match="another call was asking the server the same"):
        second.throw(TimeoutError())
    assert outcome_of(first, "found") == "found"


def test_a_signals_handler_searches_itself(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that it would wait for."""
    within: list[Any] = []
    send = FakeTransport.send

    def interrupted(transport: FakeTransport, message: Any, timeout_s: float) -> Any:
        if not within:
            within.append("its call")
            within.append(client.infer("m", {"IN0": X}))
        return send(transport, message, timeout_s)

    with client_of(server) as client:
        monkeypatch.setattr(FakeTransport, "send", interrupted)
        for result in (client.infer("m", {"IN0": X}), within[1]):
            np.testing.assert_array_equal(result["OUT0"], 2 * X)


class Counting(Counter[str]):
    """How many messages of each kind were sent."""

    def taken(self) -> dict[str, int]:
        taken = dict(self)
        self.clear()
        return taken


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting, send = Counting(), FakeTransport.send

    def counted(transport: FakeTransport, message: Any, timeout_s: float) -> Any:
        name = message.procedure if hasattr(message, "procedure") else message.path
        counting[next(kind for kind in ("unregister", "register", "config", "infer") if kind in name.lower())] += 1
        return send(transport, message, timeout_s)

    monkeypatch.setattr(FakeTransport, "send", counted)
    return counting


def gone(_: Order) -> None:
    raise ServerUnavailableError("gone")


ONE_OF_EACH = {"config": 1, "register": 1, "unregister": 1}


def test_tasks_ask_once_and_again_after_a_restart(server: FakeServer, counting: Counting, protocol: str) -> None:
    async def burst(client: Any, model: str = "m") -> list[Any]:
        calls = [client.infer(model, {"IN0": X}) for _ in range(CALLS)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def run() -> None:
        async with async_client_of(server, protocol, inline_bytes=0) as client:
            counting.taken()
            for _ in range(2):
                for result in await burst(client):
                    np.testing.assert_array_equal(result["OUT0"], 2 * X)
                assert counting.taken() == {**ONE_OF_EACH, "infer": CALLS + 1}, "one of them is the trial"
                server.before = gone
                assert {type(error) for error in await burst(client)} == {ServerUnavailableError}
                server.before = lambda _: None
                assert counting.taken() == {"infer": CALLS}
            assert {type(error) for error in await burst(client, "unknown")} == {InferenceError}
            assert counting.taken() == {"config": 1}

    asyncio.run(run())


def test_a_burst_of_threads_asks_once_and_again_once_after_a_restart(server: FakeServer, counting: Counting) -> None:
    def burst(client: Any) -> list[Any]:
        outcomes: list[Any] = []
        side_by_side(*[lambda: outcomes.append(client.infer("m", {"IN0": X}))] * THREADS)
        return outcomes

    with client_of(server, inline_bytes=0) as client:
        counting.taken()
        for _ in range(2):
            assert all((result["OUT0"] == 2 * X).all() for result in burst(client))
            assert counting.taken() == {**ONE_OF_EACH, "infer": THREADS + 1}
            server.before = gone
            with pytest.raises(ServerUnavailableError):
                client.infer("m", {"IN0": X})
            server.before = lambda _: None
            counting.taken()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_line_of_a_search_leaves_nobody_waiting(server: FakeServer) -> None:
    interrupts = Interrupts(Path(steps.__file__))
    was_interrupted, line = True, 1
    kept: list[BaseException] = []  # with all frames, as a prompt keeps it

    def infer(client: Any) -> None:
        try:
            client.infer("m", {"IN0": X})
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    while was_interrupted:
        with client_of(server) as client:
            was_interrupted = interrupts.at(line, functools.partial(infer, client))
            assert client.infer("m", {"IN0": X}, timeout_s=20)["OUT0"].shape == X.shape
        line += 1
    assert len(kept) == line - 2 > 10


def test_a_call_that_fails_late_forgets_nothing_that_was_found_out_since(server: FakeServer) -> None:
    with client_of(server) as client:
        core = cast(Any, client._core)
        client.infer("m", {"IN0": X})
        (before,) = core.known.values()
        core.forget_with(before)
        client.infer("m", {"IN0": X})
        core.forget_with(before)
        assert [] != [*core.known.values()] != [before]


def test_who_is_refused_sealed_memory_late_does_not_close_the_path_for_those_who_take_other_memory() -> None:
    codec = GrpcCodec()
    chooser = PathChooser(codec, "localhost", Registrations(codec), PoolOptions(), 0)
    known = KnownModel(ModelSpec.from_config(config("m")), 1.25)
    for known.kind in (RegionKind.SEALED, RegionKind.SYSTEM):  # as another call has found out meanwhile
        chooser.refuse(known, "direct", "shm_slot refused: too late", RegionKind.SEALED)
        assert not known.refusals
    assert known.sealed is not None


def name_in(step: Any) -> str:
    return str(step.message.request.name)


def test_each_region_is_unregistered_by_one_call() -> None:
    registrations = Registrations(GrpcCodec())
    registrations.known = {"a", "b", "c"}
    first, second, third = (registrations.drop(keys, math.inf) for keys in ("a", "bc", "abc"))
    sent = [name_in(next(first)), name_in(next(second)), name_in(second.send(None))]
    assert sorted(sent) == ["a", "b", "c"]
    assert outcome_of(third, None) is False, "nothing is left for it to do"
    with pytest.raises(StopIteration):
        second.throw(ServerUnavailableError("gone"))
    assert outcome_of(first, None) is False
    assert not registrations.is_empty
    assert name_in(next(registrations.drop([], math.inf))) == sent[2], "it is tried again"


@pytest.mark.parametrize(("said", "is_in_use"), [("it is currently in use", True), ("it is not registered", False)])
def test_a_region_in_use_at_the_server_is_unregistered_later(said: str, is_in_use: bool) -> None:
    """Triton before 24.12 says so."""
    registrations = Registrations(GrpcCodec())
    registrations.known = {"a"}
    dropping = registrations.drop(None, math.inf)
    next(dropping)
    with pytest.raises(StopIteration) as end:
        dropping.throw(InferenceError(f"Cannot unregister region 'a', {said}.", "StatusCode.INTERNAL"))
    assert (end.value.value, registrations.is_empty) == (is_in_use, not is_in_use)


def test_no_region_is_forgotten_whenever_another_call_gives_it_back() -> None:
    """Another call, whose server has gone, gives it back between any two instructions."""
    code, number, count = Registrations.drop.__code__, 0, 0
    while count >= number:
        registrations = Registrations(GrpcCodec())
        registrations.known = {"a", "b"}
        other, mine = (registrations.drop(key, math.inf) for key in "ab")
        next(other)
        number, count = number + 1, 0

        def look(frame: FrameType, event: str, _: Any, number: int = number, other: Steps[bool] = other) -> Any:
            nonlocal count
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            count += event == "opcode"
            if event == "opcode" and count == number:
                with pytest.raises(StopIteration):
                    other.throw(ServerUnavailableError("gone"))
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            next(mine)
        finally:
            sys.settrace(before)
        mine.close()
        if count >= number:
            assert registrations.known | registrations._unwanted == {"a", "b"}, number
    assert number > 10


@pytest.mark.parametrize("byte_size", [24, 2**19], ids=["small", "large"])  # of which a thread makes the memory
def test_a_burst_of_calls_that_may_be_batched_makes_no_more_blocks_than_it_needs(byte_size: int) -> None:
    async def run() -> None:
        with FakeServer(config("m", max_batch_size=16, dynamic_batching={})) as server:
            async with async_client_of(server, "grpc", inline_bytes=0) as client:
                row = np.ones((1, byte_size // 4), np.float32)
                calls = [client.infer("m", {"IN0": row}, outputs={"OUT0": byte_size}) for _ in range(65)]
                results = await asyncio.gather(*calls)
                assert all((result["OUT0"] == 2).all() for result in results)
                keys = Counter(order.parameters["shm_slot"].split("/")[2] for order in server.orders)
                assert sorted(keys.values()) == [1, 16, 16, 16, 16]

    asyncio.run(run())
