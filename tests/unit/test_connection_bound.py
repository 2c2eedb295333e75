"""Connections over HTTP that a client keeps open: as many as it ever needed at once, and none for good."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.unit.test_http_connections import answer_ten, connections_to, get

AT_ONCE: Final = 6


def test_calls_without_end_keep_as_many_connections_as_there_were_calls_at_once() -> None:
    everybody = threading.Barrier(AT_ONCE)

    def answer(stream: socket.socket) -> None:
        everybody.wait(10)
        answer_ten(stream)

    with connections_to(answer) as (peer, connections):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for _ in range(10):
                for future in [threads.submit(get, connections) for _ in range(AT_ONCE)]:
                    assert future.result().body == b"0123456789"
        assert peer.accepted == len(connections._idle) == AT_ONCE
        connections.close()
        assert connections._idle == []


def test_connections_that_a_server_closed_are_not_kept_beside_new_ones() -> None:
    with connections_to(answer_ten) as (peer, connections):
        for _ in range(20):
            get(connections)
            peer.hang_up()
        assert len(connections._idle) == 1
