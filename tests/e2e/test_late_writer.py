"""A model that writes after its client has given up, while the client uses memory again at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, Result, ShmClient
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.slot import Slot
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back

DEADLINE_S = 0.001
DELAY_US = 3000

crashes = pytest.mark.needs_triton("2.53", "an older server may crash of a deadline as it answers (its issue 7368)")


def count_wrong_results(client: ShmClient, model: str, round_count: int) -> tuple[int, int]:
    """Give up one request per round, and check the next one, whose model is another instance."""
    given_up = wrong = 0
    checked_once: tuple[int, Result] | None = None
    for value in range(1, round_count + 1):
        try:
            client.infer(model, {"VALUE_AND_DELAY_US": np.array([-value, DELAY_US])}, timeout_s=DEADLINE_S).release()
        except DeadlineExceededError:
            given_up += 1
        if checked_once is not None:
            wrong += is_wrong(*checked_once)
        try:
            result = client.infer(model, {"VALUE_AND_DELAY_US": np.array([value, 0])})
        except PeerError:  # somebody else has written over the slot's record
            wrong += 1
            checked_once = None
        else:
            wrong += is_wrong(value, result)
            checked_once = value, result
    return given_up, wrong


def is_wrong(value: int, result: Result) -> bool:
    return not bool((result["VALUES"] == value).all())


@pytest.mark.every_flavour
@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=crashes)])
def test_not_one_byte_is_wrong(triton_server: EmbeddedServer, pytestconfig: pytest.Config, protocol: str) -> None:
    rounds = 10_000 if pytestconfig.getoption("--all") else 300
    url = {"http": f"http://{triton_server.http_url}", "grpc": triton_server.grpc_url}[protocol]
    with ShmClient(url) as client:
        given_up, wrong = count_wrong_results(client, "late_writer", rounds)
    assert given_up > rounds // 2  # some answers are there before a client that had no processor looks at the clock
    assert wrong == 0


def forget_that_it_was_sent(slot: Slot) -> bool:
    slot.state = "free"
    return True


def test_without_fencing_bytes_are_wrong(triton_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "reclaim", forget_that_it_was_sent)
    with ShmClient(f"http://{triton_server.http_url}") as client:
        given_up, wrong = count_wrong_results(client, "late_writer_unfenced", 200)
    assert given_up > 100
    assert wrong > 0


INPUTS = {"COUNT_AND_DELAY_US": ((2,), np.int64)}


def count_to(call: Any, count: int, delay_us: int = 0, **named: Any) -> Result:
    call.inputs["COUNT_AND_DELAY_US"][:] = count, delay_us
    result: Result = call.infer(**named)
    return result


def test_rounds_of_late_requests_give_not_one_wrong_byte(triton_server: EmbeddedServer) -> None:
    given_up = 0
    with ShmClient(f"http://{triton_server.http_url}", timeout_s=30) as client:
        for round_number in range(100):
            with client.prepare("counting", INPUTS, outputs=["NUMBERS"]) as call:
                for _ in range(2):
                    count_to(call, 300 + round_number).release()
                try:
                    count_to(call, 300, 3000, timeout_s=0.002)
                except DeadlineExceededError:
                    given_up += 1
            with client.prepare("counting", INPUTS, outputs={"NUMBERS": 4000}) as call:
                result = count_to(call, 700, 100)
                assert result["NUMBERS"].tolist() == list(range(700))
                kept = result["NUMBERS"].copy()
                time.sleep(0.002)
                np.testing.assert_array_equal(result["NUMBERS"], kept)
            del result
        assert given_up > 30
        all_memory_comes_back(client)
