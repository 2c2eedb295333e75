"""Interrupts between any two bytecodes of a call or a stream over the client's own sockets: no connection is lost."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.client import transports
from shm_backend_utils.client.transports.grpc import streams
from shm_backend_utils.client.transports.transport import connect
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.answering_server import holding_server, serving_grpc
from tests.unit.gpu.fakes import wait_until
from tests.unit.test_closed_transports import Service, answers, ask

INTERRUPTS = Interrupts(Path(transports.__file__).parent)
STEP = 3  # of every so many bytecodes


def interrupt_everywhere(transport: Any, connections: Any, work: Callable[[], object], expected: object) -> int:
    number = 1
    while True:
        INTERRUPTS.at(number, work)
        if not INTERRUPTS.where:
            return number
        gc.collect()
        wait_until(lambda: not connections.in_use and not transport._streams.used)
        assert work() == expected, INTERRUPTS.where
        number += STEP


@pytest.fixture(autouse=True)
def _silent_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python swallows what is raised in a finalizer


def test_a_call() -> None:
    with holding_server("grpc") as server, contextlib.closing(connect(server.url, None)) as transport:
        expected = ask(transport)
        connections: Any = transport
        assert interrupt_everywhere(transport, connections._connections, lambda: ask(transport), expected) > 500


def test_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DRAIN_S", 0.05)  # a server whose last bytes were lost seems not to end
    with serving_grpc(Service()) as url, contextlib.closing(connect(url, None)) as transport:
        connections: Any = transport
        work = lambda: [each.id for each in answers(transport, "3")]  # noqa: E731
        assert interrupt_everywhere(transport, connections._stream_connections, work, ["3"] * 3) > 500
