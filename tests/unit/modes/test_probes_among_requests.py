"""Probes that come with requests, in every mode: each is answered, and the requests do not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import ShmSession
from tests.unit import emulated
from tests.unit.modes.doubling import MakeClient, Open
from tests.unit.sessions import tensor
from tests.unit.table_client import Client
from tests.unit.test_probe import never, probe_of, report_in


@pytest.fixture
def clients(make_client: MakeClient) -> list[Client]:
    return [make_client() for _ in range(4)]


@pytest.fixture
def session(open_session: Open) -> ShmSession:
    inputs = [tensor("X", dims=[-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("Y", dims=[-1])], parameters={"SHM_PATHS": "direct"}, max_batch_size=8)


def probe(client: Client) -> Any:
    return emulated.delivered(client.begin(probe_of(client)), (), {"SHM": np.empty((1, 0), np.uint8)})


def mixed(clients: list[Client]) -> list[Any]:
    """Return a request, a probe, a request, a probe."""
    carried = {"SHM": np.empty((1, 0), np.uint8)}
    return [
        probe(client)
        if number % 2
        else client.request({"X": np.full((1, 3), number, np.float32)}, {"Y": 12}, delivered=carried)
        for number, client in enumerate(clients)
    ]


def check(clients: list[Client], responses: list[Any]) -> None:
    for number, (client, response) in enumerate(zip(clients, responses, strict=True)):
        assert client.is_over()
        if number % 2:
            assert emulated.message_of(response).startswith("shm:probed: ")
            assert report_in(client)["digest"]
        else:
            np.testing.assert_array_equal(client.output("Y"), np.full((1, 3), number + 1))


def plus_one(call: Any) -> None:
    call.put("Y", call.input("X").numpy() + 1)


def test_in_a_batch(session: ShmSession, clients: list[Client]) -> None:
    check(clients, session.serve_batch(mixed(clients), plus_one))


def test_one_after_the_other(session: ShmSession, clients: list[Client]) -> None:
    check(clients, session.serve(mixed(clients), plus_one))


def test_side_by_side(session: ShmSession, clients: list[Client]) -> None:
    async def infer(call: Any) -> None:
        await asyncio.sleep(0)
        plus_one(call)

    check(clients, asyncio.run(session.serve_async(mixed(clients), infer)))


def test_the_same_one_twice_in_a_batch(session: ShmSession, clients: list[Client]) -> None:
    request = probe(clients[0])
    first, second = (emulated.message_of(each) for each in session.serve_batch([request, request], never))
    assert first.startswith("shm:probed: ")
    assert second.startswith("shm:replayed: ")


def test_a_stream_has_one_answer(open_session: Open, clients: list[Client]) -> None:
    session = open_session(parameters={"SHM_PATHS": "direct"}, model_transaction_policy={"decoupled": True})
    requests = [emulated.delivered(client.begin(probe_of(client))) for client in clients]
    session.serve_streams(requests, never)
    for client, request in zip(clients, requests, strict=True):
        assert client.is_over()
        (answer,) = emulated.answers_to(request).sent
        assert emulated.answers_to(request).is_over
        assert emulated.message_of(answer).startswith("shm:probed: ")
