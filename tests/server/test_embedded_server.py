"""The embedded server, for real: it starts, it tells why it cannot, and nothing of it outlives its launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.server import EmbeddedServer, Installation, Ports
from shm_backend_utils.server.supervisor import BoundedLog
from tests.e2e.eventually import eventually

CONFIG = """
backend: "python"
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
IDLE_MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def make_repository(folder: Path, *, model: str = IDLE_MODEL, config: str = CONFIG, name: str = "idle") -> Path:
    version = folder / "models" / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(model)
    (version.parent / "config.pbtxt").write_text(config)
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
    members = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                status = (process / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(status.rpartition(")")[2].split()[2]) == group:
                members.append(int(process.name))
    return members


def shared_memory(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


def answers(url: str) -> bool:
    with urllib.request.urlopen(f"http://{url}", timeout=10) as reply:
        return int(reply.status) == 200


def test_a_started_server_is_ready_on_every_port(triton_server: EmbeddedServer) -> None:
    assert answers(f"{triton_server.http_url}/v2/health/ready")
    assert answers(f"{triton_server.metrics_url}/metrics")
    host, port = triton_server.grpc_url.split(":")
    socket.create_connection((host, int(port)), timeout=10).close()


def test_a_server_does_not_listen_on_every_address(triton_server: EmbeddedServer) -> None:
    for url in (triton_server.grpc_url, triton_server.http_url, triton_server.metrics_url):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(url.split(":")[1])), timeout=10)


def test_its_process_and_its_log_are_told(triton_server: EmbeddedServer) -> None:
    assert Path(f"/proc/{triton_server.pid}/comm").read_text().strip() == "tritonserver"
    log = triton_server.log_file.read_text()
    assert "Started HTTPService" in log
    assert triton_server.log_tail(2) == "\n".join(log.splitlines()[-2:])


@dataclass(frozen=True)
class Stopped:
    """A server that was stopped, and what was known of it while it ran."""

    server: EmbeddedServer
    ports: Ports
    pid: int
    process_count: int
    had_shared_memory: bool


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    ports = Ports().resolve()
    with EmbeddedServer.start(make_repository(folder), ports=ports, log_file=folder / "server.log") as server:
        return Stopped(
            server, ports, server.pid, len(processes_of_group(server.pid)), bool(shared_memory(server.shm_prefix))
        )


def test_ports_that_are_given_are_used(stopped: Stopped) -> None:
    log = stopped.server.log_file.read_text()
    for service, url, port in (
        ("GRPCInferenceService", stopped.server.grpc_url, stopped.ports.grpc),
        ("HTTPService", stopped.server.http_url, stopped.ports.http),
        ("Metrics Service", stopped.server.metrics_url, stopped.ports.metrics),
    ):
        assert url == f"127.0.0.1:{port}"
        assert f"Started {service} at {url}" in log


def test_a_stopped_server_leaves_nothing_and_may_be_stopped_again(stopped: Stopped) -> None:
    assert stopped.process_count == 2  # the server and the model's stub
    assert stopped.had_shared_memory
    stopped.server.stop()
    assert not stopped.server.is_running
    assert processes_of_group(stopped.pid) == []
    assert shared_memory(stopped.server.shm_prefix) == []


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
        make_repository(tmp_path, model=IDLE_MODEL + raising, name=name)
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
        free = Ports().resolve()
        ports = Ports(**{"grpc": free.grpc, "http": free.http, "metrics": free.metrics, service: port})
        with pytest.raises(MachineError, match=f"127.0.0.1:{port}' already in use"):
            EmbeddedServer.start(repository, ports=ports, log_file=tmp_path / "server.log").stop()


def test_a_port_that_speaks_something_else_is_named_too(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=_answer_with_garbage, args=(other,), daemon=True)
        answering.start()
        with pytest.raises(MachineError, match="already in use"):
            EmbeddedServer.start(repository, ports=Ports(http=other.getsockname()[1]), log_file=tmp_path / "log")


def _answer_with_garbage(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\0\0\x18\4" + bytes(32))  # how a gRPC server begins


def test_a_server_that_does_not_get_ready_in_time_is_stopped(tmp_path: Path) -> None:
    model = IDLE_MODEL + "    def initialize(self, args):\n        __import__('time').sleep(3)\n"
    log_file = tmp_path / "server.log"
    with pytest.raises(MachineError, match="tritonserver was not ready after 0.2 s"):
        EmbeddedServer.start(make_repository(tmp_path, model=model), log_file=log_file, timeout_s=0.2)
    assert not any(str(tmp_path) in line for line in command_lines())


def command_lines() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_free_ports_are_found_for_those_not_given() -> None:
    ports = Ports(http=8000).resolve()
    assert ports.http == 8000
    assert len({0, ports.grpc, ports.http, ports.metrics}) == 4


chunks = st.lists(st.binary(min_size=1, max_size=10), max_size=30)


def logged(path: Path, limit: int, data: list[bytes]) -> tuple[bytes, bytes]:
    """Write to a fresh log; return what is in its older and in its newer file."""
    older = path.with_name(f"{path.name}.1")
    older.unlink(missing_ok=True)
    log = BoundedLog(path, limit)
    for chunk in data:
        log.write(chunk)
    log.close()
    return older.read_bytes() if older.exists() else b"", path.read_bytes()


@given(data=chunks, limit=st.integers(10, 50))
def test_a_log_never_exceeds_its_limit_and_holds_the_last_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], limit: int
) -> None:
    older, newer = logged(tmp_path_factory.getbasetemp() / "bounded.log", limit, data)
    assert max(len(older), len(newer)) <= limit
    everything = b"".join(data)
    assert everything.endswith(older + newer)
    assert older or newer == everything
