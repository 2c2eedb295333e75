"""Room for outputs that found none: regions of prepared calls grow, and streams' frames get some by a guess."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import (
    CopyWarning,
    DeadlineExceededError,
    InferenceError,
    PoolOptions,
    PreparedCall,
    Result,
    ShmClient,
)
from shm_backend_utils.client.errors import deadline_exceeded
from shm_backend_utils.client.paths import taking
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.form import TableForm
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER, parse_address
from tests.opened import open_region
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

pytestmark = pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
INPUTS = {"IN0": ((1,), np.float32)}


def counted(_: Order, inputs: Arrays) -> Arrays:
    return {"OUT0": np.arange(inputs["IN0"][0], dtype=np.float32)}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), compute=counted) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server) as client:
        yield client


def count_to(call: PreparedCall, count: int) -> Result:
    call.inputs["IN0"][0] = count
    result = call.infer()
    assert result["OUT0"].tolist() == list(range(count))
    return result


def grown(client: ShmClient, count: int = 1000) -> PreparedCall:
    call = client.prepare("m", INPUTS)
    assert count_to(call, count).overflowed
    assert not count_to(call, count).overflowed
    return call


def has_the_form_of_most(order: Order) -> bool:
    address = parse_address(order.parameters[SLOT_PARAMETER])
    with contextlib.closing(open_region(address.key, address.token, "region")) as region:
        record, form = region.record(address.slot), TableForm.of(ModelSpec.from_config(config("m")))
        data = bytes(record.request)
        assert form is not None
        return form.decode(data, record.generation, region.data_offset, region.header.byte_size) is not None


def lose(order: Order) -> None:
    raise deadline_exceeded()


def test_a_call_grows_and_grows_again_and_stays(server: FakeServer, client: ShmClient) -> None:
    with client.prepare("m", INPUTS) as call:
        overflows = [bool(count_to(call, count).overflowed) for count in (10, 10, 12, 1000, 1000, 3, 10**6, 10**6, 0)]
        assert overflows == [True, False, False, True, False, False, True, False, False]
        assert client.stats().slots_held == 1
        assert has_the_form_of_most(server.orders[-1])
        assert count_to(call, 1000).bytes_avoided == 4 + 4000
    assert client.stats().slots_held == 0
    with client.prepare("m", INPUTS, outputs={"OUT0": 4000}) as call:  # which never overflows
        for count in (1000, 1, 0):
            count_to(call, count).release()
            assert has_the_form_of_most(server.orders[-1])
        assert client.stats().slots_held == 1


def test_outgrown_room_is_used_again(client: ShmClient) -> None:
    with client.prepare("m", INPUTS) as call:
        for count in range(1000, 50_000, 1000):
            count_to(call, count).release()
        assert client.stats().pool_bytes < 3 * 4 * count
        gc.collect()
        assert len(re.findall("shmbu-", Path("/proc/self/maps").read_text())) <= 3  # first, present, model's


def test_the_array_of_an_earlier_result_stays_when_the_call_grows_and_when_it_is_closed(client: ShmClient) -> None:
    call = client.prepare("m", INPUTS)
    kept = [count_to(call, count)["OUT0"] for count in (10, 10, 1000, 1000, 10**5, 10**5)][1::2]
    assert client.stats().slots_held == 1
    call.close()
    assert [array.tolist() == list(range(array.size)) for array in kept] == [True] * 3
    kept.clear()
    assert client.stats().slots_held == 0


@pytest.mark.parametrize("told", [None, {"OUT0": 16}])
def test_calls_side_by_side_grow_if_they_do_not_share_a_region(told: dict[str, int] | None) -> None:
    batched = config("b", max_batch_size=8, dynamic_batching={})
    server = FakeServer(batched, compute=lambda _, inputs: {"OUT0": np.repeat(inputs["IN0"], 100, 1)})
    with server, client_of(server) as client:
        calls = [client.prepare("b", {"IN0": ((2, 1), np.float32)}, outputs=told) for _ in range(3)]
        for round_number in range(3):
            results = []
            for number, call in enumerate(calls):
                call.inputs["IN0"][:] = [[number], [round_number]]
                results.append(call.infer())
            for number, result in enumerate(results):
                assert result["OUT0"].tolist() == [[number] * 100, [round_number] * 100]
                assert bool(result.overflowed) == (round_number == 0 or told is not None)
        del results, result
        for call in calls:
            call.close()
        assert client.stats().slots_held == 0


def test_without_memory_a_call_does_as_before_and_says_so_once(server: FakeServer) -> None:
    with client_of(server, pool=PoolOptions(max_bytes=2**16)) as client, client.prepare("m", INPUTS) as call:
        assert count_to(call, 20_000).overflowed
        with pytest.warns(CopyWarning, match="'OUT0', and the pool has no 100000 bytes now.*raise PoolOptions"):
            assert count_to(call, 20_000).overflowed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert count_to(call, 20_000).overflowed
        assert client.stats().slot_waits == 0
        assert client.stats().slots_held == 1


def test_a_call_grows_when_memory_is_free_again(server: FakeServer) -> None:
    with client_of(server, pool=PoolOptions(max_bytes=2**17)) as client, client.prepare("m", INPUTS) as call:
        other = client.prepare("m", {"IN0": ((20_000,), np.float32)})
        assert [bool(count_to(call, 10_000).overflowed) for _ in range(2)] == [True, True]
        other.close()
        assert [bool(count_to(call, 10_000).overflowed) for _ in range(2)] == [False, False]


def without_an_answer(server: FakeServer, call: PreparedCall) -> Order:
    server.before = lose
    with pytest.raises(DeadlineExceededError):
        call.infer()
    server.before = lambda order: None
    return server.orders[-1]


def test_after_a_request_without_an_answer_the_call_goes_on(server: FakeServer, client: ShmClient) -> None:
    def fail(_: Order, inputs: Arrays) -> Arrays:
        raise InferenceError("the model failed")

    with grown(client) as call:
        late = without_an_answer(server, call)
        assert not count_to(call, 500).overflowed
        with pytest.raises(InferenceError, match="shm:stale"):
            server.infer(late)
        server.compute = fail
        with pytest.raises(InferenceError, match="the model failed"):
            call.infer()
        server.compute = counted
        assert not count_to(call, 10).overflowed, "one that failed leaves no doubt"
    assert client.stats().slots_held == client.stats().quarantined == 0


@pytest.mark.parametrize("way", ["closed", "garbage"])
def test_a_region_in_doubt_is_nobodys_until_stale(server: FakeServer, client: ShmClient, way: str) -> None:
    call = grown(client)
    address = parse_address(server.orders[-1].parameters[SLOT_PARAMETER])
    mine = call.inputs["IN0"]  # keeps the region: nobody can take it back
    late = without_an_answer(server, call)
    call.close()
    if way == "garbage":
        del call
        gc.collect()
    assert client.stats().slots_held == 1
    with client.prepare("m", INPUTS, outputs={"OUT0": 4000}) as other:
        before = count_to(other, 1000)["OUT0"]
        assert address.key not in str(server.orders[-1].parameters)
        server.infer(late)
        assert before.tolist() == list(range(1000))
    del mine, before
    assert client.stats().slots_held == client.stats().quarantined == 0


@pytest.mark.parametrize("in_doubt", [False, True])
@pytest.mark.parametrize("order", ["call, client", "client, call", "client"])
def test_whatever_is_closed_first_nothing_is_left(server: FakeServer, order: str, in_doubt: bool) -> None:
    with client_of(server) as client:
        call = grown(client)
        if in_doubt:
            without_an_answer(server, call)
        for each in order.split(", "):
            (call if each == "call" else client).close()
        assert list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")) == []
        with pytest.raises(ClosedError):
            call.infer()
        call.close()


@pytest.mark.parametrize(("path", "step"), [("inline", "message"), ("direct", "arrays")])
def test_a_call_closed_as_it_is_sent_sends_nothing(
    server: FakeServer, client: ShmClient, monkeypatch: pytest.MonkeyPatch, path: Any, step: str
) -> None:
    with client.prepare("m", INPUTS, path=path) as call:
        do_step = getattr(call._call, step)
        monkeypatch.setattr(call._call.known, "has_strings", True)  # only then does the direct path use the arrays

        def close_first() -> Any:
            call.close()
            return do_step()

        monkeypatch.setattr(call._call, step, close_first)
        with pytest.raises(ClosedError):
            call.infer()
    assert server.orders == []


def test_a_call_interrupted_as_its_region_had_grown_names_the_regions_new_token(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with client_of(server, pool=PoolOptions(max_bytes=2**17, prefault=True)) as client:
        call, other = client.prepare("m", INPUTS), client.prepare("m", INPUTS)
        assert count_to(call, 2000).overflowed
        with monkeypatch.context() as patch:
            patch.setattr(SlotRegion, "prefault", interrupt)
            with pytest.raises(KeyboardInterrupt):
                count_to(call, 2000)
        assert count_to(other, 30_000).overflowed  # the pool has too little memory for as much room
        assert count_to(call, 2000).overflowed
        sent = parse_address(server.orders[-1].parameters[SLOT_PARAMETER])
        assert sent.token == call._call.region.token  # type: ignore[attr-defined]
        assert sent.token != parse_address(server.orders[0].parameters[SLOT_PARAMETER]).token


def test_a_call_closed_while_it_grows_leaves_nothing(client: ShmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = client.prepare("m", INPUTS)
    assert count_to(call, 1000).overflowed
    grow = taking.grow

    def close_meanwhile(*arguments: Any) -> Any:
        has_room = yield from grow(*arguments)
        call.close()
        return has_room

    monkeypatch.setattr("shm_backend_utils.client.calls.grow", close_meanwhile)
    with pytest.raises(ClosedError):
        call.infer()
    gc.collect()
    assert client.stats().slots_held == client.stats().quarantined == 0


@pytest.mark.parametrize("guess", [0, 2**16, 2**20])
def test_a_first_stream_has_room_by_a_guess_that_takes_no_more_than_it_may(guess: int) -> None:
    def frames(_: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield from ({"OUT0": np.ones(250, np.float32), "OUT1": inputs["IN1"]} for _ in range(20))

    pool, one = PoolOptions(stream_guess_bytes=guess), np.ones(1, np.float32)
    two = config("s", count=2, model_transaction_policy={"decoupled": True})
    with FakeServer(two, compute=frames) as server, client_of(server, pool=pool) as client:
        results = client.stream("s", {"IN0": one, "IN1": one})
        assert {bool(result.overflowed) for result in results} == {guess == 0}
        assert client.stats().pool_bytes < 1.2 * guess + 2**17
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**20))) as small:
        assert small.stream_guess_bytes == 2**18, "never more than a quarter of the budget"
