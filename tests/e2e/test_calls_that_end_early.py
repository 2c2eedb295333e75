"""Calls that end before their answer: their memory comes back, whoever keeps the error and whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, ShmClient
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.server import EmbeddedServer
from tests.crash.registered import SomebodyElse

from .eventually import eventually
from .flavours import Flavour, LoopedClient, url_of

X: Final = np.ones((1, 4), np.float32)
BY_GRPC_NOR_HTTP: Final[dict[str, Any]] = {"path": "direct", "parameters": {"text": "half of a character: \ud800"}}
"""Options that cannot be encoded."""


def infer(client: ShmClient) -> None:
    client.infer("rows", {"X": X}, outputs=["DOUBLED"], **BY_GRPC_NOR_HTTP)


def prepare(client: ShmClient) -> None:
    with client.prepare("rows", {"X": (X.shape, X.dtype)}, outputs=["DOUBLED"], **BY_GRPC_NOR_HTTP) as call:
        call.infer()


def stream(client: ShmClient) -> None:
    next(client.stream("frames_of", {"X": X[0]}, outputs=["Y"], **BY_GRPC_NOR_HTTP))


@pytest.mark.parametrize(
    ("call", "protocol"), [(infer, "grpc"), (infer, "http"), (prepare, "grpc"), (prepare, "http"), (stream, "grpc")]
)
def test_an_error_that_somebody_keeps_keeps_no_memory_of_a_call_that_cannot_be_encoded(
    triton_server: EmbeddedServer, call: Callable[[ShmClient], None], protocol: str
) -> None:
    with ShmClient(url_of(triton_server, protocol), inline_bytes=0) as client:
        with pytest.raises((CallerError, InferenceError), match="parameter 'text' is|surrogate") as kept:
            call(client)
        assert client.stats().slots_held == 0
        assert kept.value.args


def test_a_call_that_waits_for_its_answer_when_its_client_is_closed_is_told_so(
    flavour: Flavour, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    client = flavour.client()
    answer = client.submit("call_facts", {"X": X[0]}, parameters={"note": str(note)})
    if isinstance(client, LoopedClient):
        client.run(asyncio.to_thread(eventually, note.exists))
        client.run(client.aio.close())
    else:
        eventually(note.exists)
        client.close()
    with pytest.raises(ClosedError, match="this client is closed; make a new one"):
        answer.result()
    client.close()


@pytest.mark.parametrize("count", [1, 3])
def test_memory_of_calls_that_were_given_up_is_unregistered_when_the_server_is_done(
    triton_server: EmbeddedServer, tmp_path: Path, count: int
) -> None:
    named: dict[str, Any] = {"path": "triton-shm", "parameters": {"note": str(tmp_path / "note")}, "timeout_s": 0.2}
    with SomebodyElse.at(triton_server) as somebody:
        with ShmClient(triton_server.grpc_url) as client:
            for _ in range(count):
                with pytest.raises(DeadlineExceededError):
                    client.infer("call_facts", {"X": X[0]}, **named)
        assert somebody.registered_by_this_process() == set()
