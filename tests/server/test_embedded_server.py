"""The embedded server, for real: it starts, it tells why it cannot, and nothing of it outlives its launcher."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.tools.processes import command_line, read_if_there
from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.server import EmbeddedServer, Installation, Ports, launch
from shm_backend_utils.server.supervisor import BoundedLog
from tests.e2e.eventually import eventually
from tests.unit.harness.folders import FINE, folder_of
from tests.unit.plugin.outcomes import outcome_of

MODEL = Path(__file__).resolve().parents[1] / "models" / "ordinary"
CONFIG = """
backend: "python"
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def make_repository(folder: Path, *, model: str = FINE, name: str = "idle") -> Path:
    folder_of(folder / "models", model, CONFIG, name)
    return folder / "models"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(repository, log_file=tmp_path / "server.log") as server:
        yield server


def processes_of_group(group: int) -> list[int]:
    """Return the processes of a process group: a server leads one that holds all of its stubs."""
    stats = {pid: read_if_there(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() for pid in all_processes()}
    return [pid for pid, fields in stats.items() if fields and int(fields[2]) == group]


def all_processes() -> list[int]:
    return [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]


def shared_memory(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


def answers(url: str) -> bool:
    with urllib.request.urlopen(f"http://{url}", timeout=10) as reply:
        return int(reply.status) == 200


def test_a_started_server_is_ready_on_every_port_of_one_address_and_tells_its_log(
    triton_server: EmbeddedServer,
) -> None:
    assert answers(f"{triton_server.http_url}/v2/health/ready")
    assert answers(f"{triton_server.metrics_url}/metrics")
    for url in (triton_server.grpc_url, triton_server.http_url, triton_server.metrics_url):
        host, port = url.split(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), timeout=10)
    log = triton_server.log_file.read_text()
    assert "Started HTTPService" in log
    assert triton_server.log_tail(2) == "\n".join(log.splitlines()[-2:])


def test_a_stopped_server_had_the_given_ports_and_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    ports = Ports().resolve()
    with EmbeddedServer.start(repository, ports=ports, log_file=tmp_path / "server.log") as server:
        pid = server.pid
        assert len(processes_of_group(pid)) == 2  # the server and the model's stub
        assert shared_memory(server.shm_prefix)
    log = server.log_file.read_text()
    for service, url, port in (
        ("GRPCInferenceService", server.grpc_url, ports.grpc),
        ("HTTPService", server.http_url, ports.http),
        ("Metrics Service", server.metrics_url, ports.metrics),
    ):
        assert url == f"127.0.0.1:{port}"
        assert f"Started {service} at {url}" in log
    server.stop()
    assert not server.is_running
    assert processes_of_group(pid) == []
    assert shared_memory(server.shm_prefix) == []


def test_a_server_that_has_died_has_no_process_id_though_its_supervisor_still_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as supervisor:
        monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: supervisor)
        server = EmbeddedServer(Installation(tmp_path, "2.51.0"), {}, tmp_path, Ports(1, 1, 1), tmp_path / "server.log")
        assert repr(server) == "<EmbeddedServer grpc=127.0.0.1:1 http=127.0.0.1:1 running>"
        with pytest.raises(ClosedError):
            server.pid  # noqa: B018
        supervisor.kill()


def test_a_server_that_is_killed_leaves_nothing(triton_server: EmbeddedServer, server: EmbeddedServer) -> None:
    assert answers(f"{server.http_url}/v2/models/idle/ready")
    assert triton_server.shm_prefix != server.shm_prefix
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    assert server.wait() != 0
    assert processes_of_group(pid) == []
    assert shared_memory(server.shm_prefix) == []
    assert answers(f"{triton_server.http_url}/v2/health/ready")


LAUNCHER = """
import sys, time
from pathlib import Path
from shm_backend_utils.server import EmbeddedServer
server = EmbeddedServer.start(Path(sys.argv[1]), log_file=Path(sys.argv[2]))
print(server.pid, server.shm_prefix, flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_launcher_that_is_killed(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(repository), str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid, prefix = launcher.stdout.readline().split()
        assert len(processes_of_group(int(pid))) == 2
        launcher.kill()
    eventually(lambda: not processes_of_group(int(pid)))
    eventually(lambda: not shared_memory(prefix))


def test_models_that_raise_are_named_with_their_reasons_as_these_are_written(tmp_path: Path) -> None:
    words = ("the weights are missing", 'add { name: "SHM" data_type: TYPE_UINT8 } to the inputs')
    for name, reason in zip(("idle", "lazy"), words, strict=True):
        raising = f"    def initialize(self, args):\n        raise ValueError({reason!r})\n"
        make_repository(tmp_path, model=FINE + raising, name=name)
    with pytest.raises(MachineError) as failure:
        EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "server.log")
    for name, reason in zip(("idle", "lazy"), words, strict=True):
        assert re.search(f"failed to load '{name}' version 1: .*ValueError: {re.escape(reason)}", str(failure.value))


@pytest.mark.parametrize("service", ["grpc", "metrics"])
def test_a_port_that_is_in_use_is_named(repository: Path, tmp_path: Path, service: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ports = Ports().resolve()._replace(**{service: port})
        with pytest.raises(MachineError, match=f"127.0.0.1:{port}' already in use"):
            EmbeddedServer.start(repository, ports=ports, log_file=tmp_path / "server.log").stop()


def test_a_port_that_speaks_something_else_is_named_too(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer_with_garbage() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"\0\0\x18\4" + bytes(32))  # how a gRPC server begins

        threading.Thread(target=answer_with_garbage, daemon=True).start()
        with pytest.raises(MachineError, match="already in use"):
            EmbeddedServer.start(repository, ports=Ports(http=other.getsockname()[1]), log_file=tmp_path / "log")


def test_a_server_that_does_not_get_ready_in_time_is_stopped(tmp_path: Path) -> None:
    model = FINE + "    def initialize(self, args):\n        __import__('time').sleep(3)\n"
    log_file = tmp_path / "server.log"
    with pytest.raises(MachineError, match="tritonserver was not ready after 0.2 s"):
        EmbeddedServer.start(make_repository(tmp_path, model=model), log_file=log_file, timeout_s=0.2)
    assert not any(str(tmp_path) in command_line(pid) for pid in all_processes() if pid != os.getpid())


@pytest.mark.long
def test_a_test_that_meets_a_crash_is_run_once_more(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model_repository" / MODEL.name, ignore=shutil.ignore_patterns("__pycache__"))
    status, printed = outcome_of(
        tmp_path,
        """
        import os
        import signal

        import pytest
        from shm_backend_utils.client import ShmClient

        crashed = []

        @pytest.fixture(scope="module")
        def client(triton_server):
            with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
                yield client

        def test_it(client, triton_server):
            if not crashed:
                crashed.append(triton_server.pid)
                os.kill(triton_server.pid, signal.SIGSEGV)
            while triton_server.pid == crashed[0]:
                assert client.is_model_ready("ordinary")
            assert client.is_model_ready("ordinary")
        """,
    )
    assert (status, "1 passed, 1 server died" in printed) == (0, True), printed
    assert "test_it.py::test_it: failed as Triton itself crashed, and was run once more\nSignal (11)" in printed


def test_a_host_without_free_ports_is_an_error_and_users_numbers_at_random_stay_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = random.getstate()
    ports = Ports(http=8000).resolve()
    assert (ports.http, len({0, *ports})) == (8000, 4)
    assert random.getstate() == before
    monkeypatch.setattr(launch, "_HOST", "192.0.2.1")  # TEST-NET-1 (RFC 5737): no machine has this address
    with pytest.raises(OSError, match="Cannot assign requested address"):
        Ports().resolve()


def logged(path: Path, limit: int, data: list[bytes]) -> tuple[bytes, bytes]:
    """Write to a fresh log; return what is in its older and in its newer file."""
    older = path.with_name(f"{path.name}.1")
    older.unlink(missing_ok=True)
    log = BoundedLog(path, limit)
    for chunk in data:
        log.write(chunk)
    log.close()
    return older.read_bytes() if older.exists() else b"", path.read_bytes()


@given(data=st.lists(st.binary(min_size=1, max_size=10), max_size=30), limit=st.integers(10, 50))
def test_a_log_never_exceeds_its_limit_and_holds_the_last_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], limit: int
) -> None:
    older, newer = logged(tmp_path_factory.getbasetemp() / "bounded.log", limit, data)
    assert max(len(older), len(newer)) <= limit
    everything = b"".join(data)
    assert everything.endswith(older + newer)
    assert older or newer == everything
