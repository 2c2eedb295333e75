"""Where a stub finds the server that has started it, by that one's command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = "from shm_backend_utils.model.server_address import url_of_parent; print(url_of_parent())"
PARENT = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {CHILD!r}], check=True)"


def found_below(*words: str, program: str = "/opt/tritonserver/bin/tritonserver") -> str:
    """Return the URL that a process finds whose parent has such a command line, as a stub's parent has."""
    command = [program, "-c", PARENT, *words]
    done = subprocess.run(command, executable=sys.executable, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def test_a_server_is_looked_for_at_its_usual_port() -> None:
    assert found_below() == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "words",
    [
        ("--http-port=9000",),
        ("--http-port", "9000"),
        ("--grpc-port=9001", "--http-port=9000", "--metrics-port=9002"),
        ("--http-port=8999", "--http-port=9000"),
    ],
)
def test_a_server_tells_its_port(words: tuple[str, ...]) -> None:
    assert found_below(*words) == "http://127.0.0.1:9000"


def test_a_server_tells_its_address() -> None:
    assert found_below("--http-port=9000", "--http-address=127.0.0.2") == "http://127.0.0.2:9000"
    assert found_below("--http-address", "127.0.0.2") == "http://127.0.0.2:8000"
    assert found_below("--http-address=fe80::1") == "http://[fe80::1]:8000"


def test_a_server_that_listens_everywhere_is_reached_where_nobody_else_can_listen() -> None:
    """``localhost`` is ``::1`` first on most machines, where it does not listen, and anybody may."""
    assert found_below("--http-address=0.0.0.0") == "http://127.0.0.1:8000"
    assert found_below("--http-address=::") == "http://[::1]:8000"


@pytest.mark.parametrize(
    "words", [("--allow-http=false",), ("--allow-http", "false"), ("--allow-http=False",), ("--allow-http=0",)]
)
def test_a_server_without_http_is_nowhere(words: tuple[str, ...]) -> None:
    assert found_below(*words) == "None"


def test_a_server_with_http_said_aloud_is_where_it_is() -> None:
    assert found_below("--allow-http=true") == "http://127.0.0.1:8000"


def test_a_process_that_has_a_server_inside_may_serve_no_http() -> None:
    assert found_below("--http-port=9000", program="python3") == "None"


@pytest.mark.parametrize("word", ["--http-por=9000", "--allow-htt=false", "--http-addr=127.0.0.2"])
def test_an_option_that_may_be_short_for_one_that_counts_tells_nothing(word: str) -> None:
    """Triton parses with getopt_long, and so takes these."""
    assert found_below(word) == "None"
    assert found_below("--http-header-forward-pattern=.*", "-h", "--") == "http://127.0.0.1:8000"


def test_a_server_at_localhost_may_be_anywhere() -> None:
    assert found_below("--http-address=localhost") == "None"


def test_a_build_for_vertex_ai_serves_http_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    assert found_below() == "None"
    assert found_below("--allow-http=true") == "http://127.0.0.1:8000"


def test_a_command_line_of_any_bytes_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    monkeypatch.setenv("LC_ALL", "POSIX")
    assert found_below("--id=mod\u00e8le") == "http://127.0.0.1:8000"
