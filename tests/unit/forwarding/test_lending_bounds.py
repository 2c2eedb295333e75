"""Which arrays lie in memory that may be lent, and which models take it; calls that break off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import TensorError
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model import Call
from shm_backend_utils.model.forward.direct import Lending, LentMemory
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.model.mapping.policy import borrow_slot
from shm_backend_utils.protocol.claims import LentRegionClaim, NamedRegionClaim
from shm_backend_utils.protocol.spans import MAX_TENSORS
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.emulated import answered, message_of
from tests.unit.forwarding.conftest import Models, X, config, two_models
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client

WHOLE = np.zeros(64, np.uint8)
PART = WHOLE[16:48]  # what is lent
ON_A_GPU = SimpleNamespace(nbytes=4, flags=SimpleNamespace(c_contiguous=True))


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(PoolOptions(max_bytes=1 << 20))
    yield pool
    pool.close()


@pytest.fixture
def lending(pool: SlotPool) -> Lending:
    lent = LentMemory(NamedRegionClaim("r"), HostMemory(WHOLE, begin=16, byte_size=32), ((0, 32),))
    return Lending([None, lent], pool)


@pytest.mark.parametrize(
    ("array", "offset"),
    [
        *((PART, 0), (PART[:1], 0), (PART[31:], 31), (PART[8:24], 8)),
        *((WHOLE[begin:end], None) for begin, end in ((15, 17), (15, 16), (47, 49), (48, 49), (16, 49))),
        *((array, None) for array in (PART[::2], PART[:0], X, ON_A_GPU)),
    ],
)
def test_what_lies_inside_is_lent_and_nothing_else(lending: Lending, array: Any, offset: int | None) -> None:
    assert lending.place_of(array) == (None if offset is None else (1, offset))
    assert lending.claims == ([] if offset is None else [NamedRegionClaim("r")])


@pytest.mark.parametrize(("begin", "end", "is_lent"), [(0, 8, True), (16, 32, True), (4, 16, False), (8, 16, False)])
def test_of_a_region_only_the_calls_own_tensors_are_lent(pool: SlotPool, begin: int, end: int, is_lent: bool) -> None:
    lent = LentMemory(NamedRegionClaim("r"), HostMemory(WHOLE, begin=16, byte_size=32), ((0, 8), (16, 32)))
    assert bool(Lending([lent], pool).place_of(PART[begin:end])) is is_lent


def test_memory_that_earlier_calls_hold_is_lent_from_first_byte_to_last(lending: Lending, pool: SlotPool) -> None:
    region, memory = pool.take_granted(pool.request(Need(100), "test"))
    assert lending.place_of(memory) == (1, 0)
    assert lending.place_of(memory[-1:]) == (1, region.byte_size - 1)
    assert lending.place_of(memory[10:20]) == (1, 10)
    assert lending.place_of(memory[::2]) is None
    (claim,) = lending.claims
    assert isinstance(claim, LentRegionClaim)
    assert claim.key == region.key
    lending.memories.clear()  # they keep it mapped


def test_memory_lent_to_a_call_that_is_given_up_waits_for_the_borrower(lending: Lending, pool: SlotPool) -> None:
    region, memory = pool.take_granted(pool.request(Need(100), "test"))
    assert lending.place_of(memory) == (1, 0)
    borrowed = borrow_slot(region.managed, 0)
    lending.keep_from_use()
    lending.memories.clear()
    del memory
    assert pool.status.quarantined == 1
    borrowed.give_back()
    deadline = time.monotonic() + 30
    while pool.status.idle == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.status.idle == 1


def many_tensors() -> dict[str, Any]:
    found = config("other", "direct,triton-shm")
    found["input"] += [tensor(f"X{number}") for number in range(MAX_TENSORS)]
    return found


@pytest.mark.parametrize(
    ("other", "paths"),
    [
        (config("other"), ["direct"]),
        (config("other", "triton-shm"), ["triton"]),
        (config("other", ""), ["triton"]),
        (many_tensors(), ["triton"]),
        (config("other", model_transaction_policy={"decoupled": True}), []),
    ],
)
def test_memory_is_lent_if_taken(monkeypatch: pytest.MonkeyPatch, client: Client, other: Any, paths: list[str]) -> None:
    found: list[str] = []

    def answer(call: Call) -> None:
        found.append(call.path)
        call.put("Y", call.input("X"))

    with two_models(monkeypatch, other) as models:
        models.answer = answer if paths else None
        models.serve(client, lambda call: call.put("Y", call.forward("other", {"X": call.input("X")}, {"Y": 16})["Y"]))
    assert found == paths


HALF = np.arange(8192, dtype=np.float32)  # half of what goes in band


@pytest.fixture
def in_band(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    with two_models(monkeypatch, config("other", "direct,inline")) as models:
        yield models


def paths_of(models: Models, client: Client, given: Any, outputs: Any = None, times: int = 1) -> list[tuple[str, str]]:
    """Return how X came to the other model, and Y from there, call by call."""
    found: list[tuple[str, str]] = []
    came: list[str] = []
    answer = models.answer or double

    def infer(call: Call) -> None:
        for _ in range(times):
            y = call.forward("other", {"X": given}, outputs)["Y"]
            assert y.numpy().tolist() == np.resize(given * 2, y.shape).tolist()
            assert not y.writable
            found.append((came.pop(), y.path))
        call.put("Y", np.zeros(4, np.float32))

    def noting(call: Call) -> None:
        came.append(call.input("X").path)
        answer(call)

    models.answer = noting
    response = models.serve(client, infer)
    assert response.error() is None, message_of(response)
    return found


IN_BAND = ("triton", "triton")
IN_MEMORY = ("direct", "direct")


@pytest.mark.parametrize(
    ("count", "room", "expected"),
    [(1, 4, IN_BAND), (8192, 32768, IN_BAND), (8192, 32769, IN_MEMORY), (8193, 32772, IN_MEMORY)],
)
def test_64_kib_go_in_band(in_band: Models, client: Client, count: int, room: int, expected: tuple[str, str]) -> None:
    assert paths_of(in_band, client, np.arange(count, dtype=np.float32), {"Y": room}) == [expected]


def test_outputs_that_turn_out_large_have_room_the_next_time(in_band: Models, client: Client) -> None:
    in_band.answer = lambda call: call.put("Y", np.resize(call.input("X").numpy() * 2, 20000))
    assert paths_of(in_band, client, HALF, None, 3) == [IN_BAND, IN_MEMORY, IN_MEMORY]


@pytest.mark.parametrize(
    "other",
    [
        config("other"),
        config("other", "direct,triton-shm"),
        config("other", "direct,inline", output=[tensor("Y"), tensor("Z", "STRING")]),
        config("other", "direct,inline", output=[tensor("Y"), tensor("Z", "BF16")]),
    ],
)
def test_some_models_take_none_in_band(monkeypatch: pytest.MonkeyPatch, client: Client, other: dict[str, Any]) -> None:
    with two_models(monkeypatch, other) as models:
        assert paths_of(models, client, HALF, {"Y": 32768}) == [IN_MEMORY]


def test_none_go_in_band_if_the_configuration_says_so(in_band: Models, client: Client) -> None:
    in_band.caller._open_context().forwarder._inline_bytes = 0
    assert paths_of(in_band, client, HALF[:1], {"Y": 4}) == [IN_MEMORY]


@pytest.mark.parametrize("inline_bytes", [0, 2**16])
@pytest.mark.parametrize(
    "given", [{}, {"X": HALF[:4]}, {"X": np.zeros((5, 1), np.float32)}, {"X": np.zeros((0, 1), np.float32)}]
)
def test_what_the_other_model_does_not_take_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, client: Client, given: dict[str, Any], inline_bytes: int
) -> None:
    other = config("other", "direct,inline", max_batch_size=4)
    other["input"].append(tensor("SHM", "UINT8"))

    def infer(call: Call) -> None:
        with pytest.raises(TensorError):
            call.forward("other", given)
        call.put("Y", np.zeros(4, np.float32))

    with two_models(monkeypatch, other) as models:
        models.caller._open_context().forwarder._inline_bytes = inline_bytes
        response = models.serve(client, infer)
        assert response.error() is None, message_of(response)


SLOTS = 2
KINDS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]


class Server:
    """Brings requests of a model to the other one, as Triton does; but raises, or answers, an outcome for some."""

    def __init__(self, models: Models) -> None:
        self.failed: list[InferenceRequest] = []
        self.outcome: type[BaseException] | InferenceResponse
        self.deliver = models.execute
        models.execute = self.execute  # type: ignore[method-assign]

    def execute(self, request: InferenceRequest) -> InferenceResponse:
        if not json.loads(request.parameters())["fails"]:
            return self.deliver(request)
        self.failed.append(request)
        if isinstance(self.outcome, type):
            raise self.outcome("no")
        return self.outcome


@pytest.fixture
def server(models: Models) -> Server:
    return Server(models)


def arguments(call: Call) -> tuple[Any, ...]:
    return "other", {"X": call.input("X")}, {"Y": call.output("Y", (4,), np.float32)}


def forward(call: Call) -> None:
    call.forward(*arguments(call), parameters={"fails": call.parameters["fails"]})


async def forward_async(call: Call) -> None:
    await call.forward_async(*arguments(call), parameters={"fails": call.parameters["fails"]})


def requests_of(client: Client) -> list[InferenceRequest]:
    """Return two requests, of which the first one's call of the other model is to fail."""
    return [client.request({"X": X + slot}, {"Y": 16}, slot, fails=1 - slot) for slot in range(2)]


def check_late_request_is_stale(server: Server, client: Client) -> None:
    client.region.bytes()[client.data :] = 7
    assert message_of(server.deliver(server.failed[0])).startswith("shm:stale: ")
    assert set(client.region.bytes()[client.data :].tolist()) == {7}


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, RuntimeError])
def test_what_breaks_off_a_call_of_another_model_fails_one_request_and_the_other_model_refuses_it(
    models: Models, server: Server, client: Client, kind: type[BaseException], side_by_side: bool
) -> None:
    server.outcome = kind
    if side_by_side:
        failed, served = asyncio.run(models.caller.serve_async(requests_of(client), forward_async))
    else:
        failed, served = models.caller.serve(requests_of(client), forward)
    assert kind.__name__ in message_of(failed)
    assert served.error() is None
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert client.is_over(1)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_waits_for_the_other(models: Models, server: Server, client: Client, kind: type[BaseException]) -> None:
    def infer(call: Call) -> None:
        with pytest.raises(kind):
            forward(call)
        call.put("Y", X)  # as if nothing had happened

    server.outcome = kind
    (response,) = models.caller.serve(requests_of(client)[:1], infer)
    assert "model.py has left the call while 1 calls" in message_of(response)
    assert (client.region.record(0).started, client.region.record(0).completed) == (1, 0)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


def test_a_model_may_go_on_without_one_that_is_refused(models: Models, server: Server, client: Client) -> None:
    def infer(call: Call) -> None:
        try:
            forward(call)
        except RuntimeError:
            double(call)

    server.outcome = RuntimeError
    assert [response.error() for response in models.caller.serve(requests_of(client), infer)] == [None, None]
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]


def test_a_request_answered_too_early_is_refused_later(models: Models, server: Server, client: Client) -> None:
    server.outcome = answered([], "not today")
    (response,) = models.caller.serve(requests_of(client)[:1], forward)
    assert "not today" in message_of(response)
    check_late_request_is_stale(server, client)
