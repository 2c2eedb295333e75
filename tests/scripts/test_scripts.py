"""The tools behind ``scripts/serve`` and ``scripts/demo``, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from scripts.tools import ROOT
from scripts.tools.processes import children, command_line
from shm_backend_utils.cli.common.server import REPOSITORY, copy_models
from tests.e2e.eventually import eventually

SHARED_MEMORY = Path("/dev/shm")
DEADLINE_S = 60.0
COMMANDS = [file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and not file.suffix]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_helps_before_anything_is_installed(command: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "shm_backend_utils").symlink_to(ROOT / "shm_backend_utils")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [str(tmp_path / "scripts" / command), "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert re.match(rf"usage: \S+[ /]{command}\b", done.stdout)
    assert done.stderr == ""


class Program(subprocess.Popen[str]):
    """A program that runs, and what it leaves behind."""

    def __init__(self, *command: str) -> None:
        words = [sys.executable, "-m", "shm_backend_utils", *command]
        super().__init__(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def first_line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline()

    def finish(self) -> tuple[int, str, str]:
        out, error = self.communicate(timeout=DEADLINE_S)
        return self.returncode, out, error

    def server(self) -> tuple[int, str]:
        """Return the process id of the tritonserver, and what the names of its shared memory begin with."""
        supervisor = eventually(lambda: child_of(self.pid, "shm_backend_utils.server.supervisor"))
        server = eventually(lambda: child_of(supervisor[0], "bin/tritonserver"))
        prefix = re.search(r"shm-region-prefix-name=(\w+)", server[1])
        assert prefix is not None
        return server[0], prefix[1]


def child_of(parent: int, word: str) -> tuple[int, str] | None:
    commands = {pid: command_line(pid) for pid in children(parent)}
    return next(((pid, command) for pid, command in commands.items() if word in command), None)


def shared_memory_of(*prefixes: str) -> list[str]:
    return [path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefixes)]


def regions_of_demo(pid: int) -> tuple[str, str]:
    return f"shmbu-{pid}-", f"demo-{pid}-"


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start_program(*command: str) -> Program:
        programs.append(Program(*command))
        return programs[-1]

    yield start_program
    for program in programs:
        program.terminate()  # if it has not ended
        program.communicate(timeout=DEADLINE_S)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository that is loaded sooner than that of all samples."""
    return copy_models([REPOSITORY / "identity"], tmp_path / "models")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_ready_and_ends_on_a_signal(start: Callable[..., Program], models: Path, number: int) -> None:
    serve = start("serve", "--numpy=own", *(["--model-repository", str(models)] if number == signal.SIGINT else []))
    ready = re.fullmatch(r"READY grpc=(\S+:\d+) http=\S+:\d+ metrics=\S+:\d+ log=(\S+)\n", serve.first_line())
    assert ready is not None
    assert "Started GRPCInferenceService" in Path(ready[2]).read_text()
    with grpcclient.InferenceServerClient(ready[1]) as client:
        assert client.is_model_ready("identity")
    server_pid, prefix = serve.server()
    assert shared_memory_of(prefix)  # or there would be nothing that could be left
    serve.send_signal(number)
    assert serve.finish() == (0, "", f"loading the models; the server's log is {ready[2]}\n")
    assert not Path(f"/proc/{server_pid}").exists()
    assert shared_memory_of(prefix) == []


def test_serve_ends_cleanly_on_a_signal_while_the_server_starts(start: Callable[..., Program], models: Path) -> None:
    serve = start("serve", "--numpy=own", "--model-repository", str(models))
    server_pid, prefix = serve.server()
    serve.send_signal(signal.SIGTERM)
    status, out, error = serve.finish()
    assert (status, out, [line[:7] for line in error.splitlines()]) in ((0, "", []), (0, "", ["loading"]))
    assert not Path(f"/proc/{server_pid}").exists()
    assert shared_memory_of(prefix) == []


@pytest.mark.long
def test_serve_fails_with_the_end_of_the_log_when_the_server_dies(start: Callable[..., Program], models: Path) -> None:
    serve = start("serve", "--model-repository", str(models))
    serve.first_line()
    server_pid, prefix = serve.server()
    os.kill(server_pid, signal.SIGKILL)
    status, _, error = serve.finish()
    assert status != 0
    assert "Started GRPCInferenceService" in error
    assert "exited by itself" in error
    assert shared_memory_of(prefix) == []


@pytest.mark.long
def test_demo_finds_the_results_of_all_paths_identical(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start("demo", "--rounds", "1", "--picture", str(tmp_path / "demo.png"))
    _, prefix = program.server()
    status, out, _ = program.finish()
    summary = json.loads(out.splitlines()[-1])
    assert (status, summary["identical"]) == (0, True)
    assert all(summary[f"{what}_ms"] > 0 for what in ("direct", "triton_shm", "inline", "empty"))
    assert set(summary["wire_bytes"]) == {"direct", "triton_shm", "inline"}
    assert summary["wire_bytes"]["direct"] * 1000 < summary["wire_bytes"]["inline"]
    # A large photograph takes as many bytes as a small one, but for digits.
    row = next(line for line in out.splitlines() if "direct" in line)
    counts = [int(number) for number in re.findall(r"\b\d{3}\b", row.split("│")[2])]
    assert counts
    assert max(counts) - min(counts) < 16
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert shared_memory_of(prefix, *regions_of_demo(program.pid)) == []


@pytest.mark.long
def test_an_interrupted_demo_leaves_nothing_in_memory_or_at_the_server(start: Callable[..., Program]) -> None:
    url = start("serve").first_line().split()[1].removeprefix("grpc=")
    with grpcclient.InferenceServerClient(url) as client:
        demo = start("demo", "--url", url, "--rounds", "100000")
        regions = regions_of_demo(demo.pid)
        eventually(lambda: len(shared_memory_of(*regions)) > 2)
        assert client.get_system_shared_memory_status().regions
        time.sleep(1)  # into the requests
        demo.send_signal(signal.SIGINT)
        status, out, error = demo.finish()
        assert (status, out) == (128 + signal.SIGINT, "")
        assert "Traceback" not in error
        assert "resource_tracker" not in error
        assert shared_memory_of(*regions) == []
        assert not client.get_system_shared_memory_status().regions
