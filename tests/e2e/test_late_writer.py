"""A model that writes after its client has given up, while the client uses memory again at once."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, Result, ShmClient
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.slot import Slot
from shm_backend_utils.server import EmbeddedServer

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
    assert given_up > rounds // 4  # some answers are there before a client that had no processor looks at the clock
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
