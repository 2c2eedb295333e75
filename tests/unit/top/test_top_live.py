"""``shm-backend-utils top`` in a terminal: what it shows while the world changes, and how it leaves the terminal."""

from __future__ import annotations

import re
import signal

import pytest

from tests.unit.top.metrics_text import MetricsServer, calls, metrics_server
from tests.unit.top.terminal import top_in_terminal

QUICK = ["--interval", "0.1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_terminal_is_as_before(server: MetricsServer, number: int) -> None:
    with top_in_terminal("--metrics-url", server.url, *QUICK) as terminal:
        terminal.wait_for(lambda screen: "REQUESTS" in screen)
        assert terminal.end(number) == 0
        assert terminal.written.count("\x1b[?1049h") == terminal.written.count("\x1b[?1049l") == 1
        assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")
        assert "Traceback" not in terminal.written


def test_it_is_drawn_anew_when_the_terminal_is_resized(server: MetricsServer) -> None:
    with top_in_terminal("--metrics-url", server.url, "--interval", "3600", width=160, height=40) as terminal:
        wide = terminal.wait_for(lambda screen: "REGIONS" in screen)
        assert max(map(len, wide.splitlines())) <= 160
        terminal.resize(80, 24)
        narrow = terminal.wait_for(lambda screen: max(map(len, screen.splitlines())) <= 80)
        assert "REGIONS" in narrow
        assert len(narrow.splitlines()) <= 24
        assert terminal.end(signal.SIGINT) == 0


def test_a_server_may_go_away_and_come_back() -> None:
    with metrics_server() as server:
        port = int(server.url.rpartition(":")[2])
    with top_in_terminal("--metrics-url", server.url, *QUICK) as terminal:
        for count in (1_000_000, 10):
            with metrics_server(port) as server:
                server.text += calls("direct", count)
                screen = terminal.wait_for(row_of_model)
                assert "does not answer" not in screen
                assert re.search(r"-\d", row_of_model(screen)) is None
            terminal.wait_for(lambda screen: f"{server.url} does not answer (Connection refused)" in screen)
        assert terminal.end(signal.SIGINT) == 0


def row_of_model(screen: str) -> str:
    """Return the model's row among the requests; nothing if it has none."""
    return next((line for line in screen.splitlines() if line.startswith("multiply 1 ")), "")
