"""A shared server that dies costs no test that has nothing to do with it, and says so; here, a server of two lines."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.plugin.outcomes import outcome_of

# What the fixture needs of EmbeddedServer, without the seconds that a real one takes to start.
SERVER = """
import contextlib
import itertools
import time

import shm_backend_utils.server
import pytest

starts = itertools.count(1)
CRASH = "I1123 Started\\nSignal (11) received.\\n 0# 0x00 in tritonserver\\n"
KILL = "I1123 Started\\n"


class Mortal:
    def __init__(self, folder):
        self.number = next(starts)
        self.is_running = True
        self.shm_prefix = f"nobody-has-this-{self.number}"
        self.log_file = folder / f"log{self.number}"

    def is_ready(self):
        return self.is_running

    def die(self, log):
        self.log_file.write_text(log)
        self.is_running = False

    def log_tail(self, line_count):
        return self.log_file.read_text()


@contextlib.contextmanager
def start(repository, folder, seconds=0):
    time.sleep(seconds)
    server = Mortal(folder)
    yield server
    server.is_running = False


@pytest.fixture(scope="session")
def triton_server_options(tmp_path_factory):
    return {"folder": tmp_path_factory.mktemp("logs")}


@pytest.fixture(scope="session", autouse=True)
def no_triton():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_backend_utils.server.EmbeddedServer, "start", start)
        yield


@pytest.fixture(scope="module")
def client(triton_server):
    assert triton_server.is_running
    return triton_server.number
"""
HEADING = "tritonserver died during these tests"
FILES = {
    "test_a": """
        from conftest import CRASH

        numbers = []

        def test_before(client, triton_server):
            assert client == triton_server.number
            numbers.append(client)

        def test_it(client, triton_server):
            if client == numbers[0]:
                triton_server.die(CRASH)
            assert triton_server.is_running

        def test_after(client, triton_server):
            assert client == triton_server.number == numbers[0] + 1
    """,
    "test_second": """
        from conftest import CRASH

        numbers = []

        def test_it(triton_server):
            numbers.append(triton_server.number)
            triton_server.die(CRASH)
            assert triton_server.is_running

        def test_after(triton_server):
            assert triton_server.number == numbers[0] + 2
    """,
    "test_kill": """
        from conftest import KILL

        def test_it(client, triton_server):
            triton_server.die(KILL)
            assert triton_server.is_running

        def test_after(client, triton_server):
            assert client == triton_server.number
    """,
    "test_unmet": """
        from conftest import KILL

        def test_it(client, triton_server):
            triton_server.die(KILL)

        def test_after(client, triton_server):
            assert client == triton_server.number
    """,
    "test_fixture": """
        import pytest
        from conftest import CRASH

        numbers = []

        @pytest.fixture(scope="module")
        def report(triton_server):
            numbers.append(triton_server.number)
            if len(numbers) == 1:
                triton_server.die(CRASH)
            assert triton_server.is_running

        def test_it(report):
            pass

        def test_after(report, triton_server):
            assert numbers == [triton_server.number - 1, triton_server.number]
    """,
    "test_z": """
        from conftest import KILL

        def test_last(triton_server):
            triton_server.die(KILL)
    """,
}
"""Each has a server die in a way of its own."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(SERVER)
    return tmp_path


def test_who_has_to_do_with_a_death_is_told_and_run_once_more_if_triton_crashed_and_nobody_else_fails(
    project: Path,
) -> None:
    for name, text in FILES.items():
        (project / f"{name}.py").write_text(textwrap.dedent(text))
    status, printed = outcome_of(project, "")
    assert (status, "2 failed, 10 passed, 7 server died" in printed) == (1, True), printed
    for told in (
        HEADING,
        "test_a.py::test_it: failed as Triton itself crashed, and was run once more\nSignal (11)",
        "test_second.py::test_it: failed\nSignal (11)",
        "test_kill.py::test_it: failed\nI1123 Started",
        "test_unmet.py::test_it: passed, and the server was found dead after it",
        "test_z.py::test_last: passed, and the server was found dead after it",
    ):
        assert told in printed, printed


@pytest.mark.long
def test_the_time_that_a_start_takes_is_not_the_tests(project: Path) -> None:
    status, printed = outcome_of(
        project,
        """
        import time

        import pytest

        @pytest.fixture(scope="session")
        def triton_server_options(tmp_path_factory):
            return {"folder": tmp_path_factory.mktemp("logs"), "seconds": 1.5}

        @pytest.mark.timeout(1)
        def test_it(triton_server):
            pass

        @pytest.mark.timeout(1)
        def test_after(triton_server):
            time.sleep(20)
        """,
    )
    assert (status, "1 failed, 1 passed" in printed, "Timeout" in printed) == (1, True, True), printed
