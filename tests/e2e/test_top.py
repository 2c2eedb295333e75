"""``shm-backend-utils top`` beside a real server, while requests go by every path."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.client.options import PathName
from tests.unit.top.terminal import top_in_terminal

from .loading_server import LoadingServer

ROOT = Path(__file__).parents[2]
MODEL = "watched"
X = np.arange(1000, dtype=np.float32)
ROOM = {"FILLED": X.nbytes, "COPIED": X.nbytes, "PASSED": X.nbytes}
PATHS: tuple[PathName, ...] = ("direct", "triton-shm", "inline")
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [
  { name: "FILLED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "COPIED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "PASSED" data_type: TYPE_FP32 dims: [ -1 ] }
]
parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }
parameters { key: "SHM_METRICS" value: { string_value: "true" } }
instance_group [ { kind: KIND_CPU } ]
"""


@pytest.fixture(scope="module")
def metrics_url(loading_server: LoadingServer) -> str:
    """Where the metrics of a server are whose model publishes them."""
    loading_server.load(MODEL, "measured", CONFIG)
    return f"http://{loading_server.server.metrics_url}"


@contextlib.contextmanager
def requests(url: str) -> Iterator[None]:
    """Send requests by every path, in turns, until the block ends."""
    is_over = threading.Event()

    def send() -> None:
        with ShmClient(url, timeout_s=30, pool=PoolOptions(region="system")) as client:
            while not is_over.is_set():
                for path in PATHS:
                    client.infer(MODEL, {"X": X}, outputs=ROOM, path=path).release()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_requests_by_path_and_who_maps_what(loading_server: LoadingServer, metrics_url: str) -> None:
    command = [sys.executable, "-m", "shm_backend_utils", "top", "--json", "--metrics-url", metrics_url]
    with requests(loading_server.server.grpc_url):
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    model = next(model for model in found["models"] if model["model"] == MODEL)
    assert model["instances"] == 1
    assert model["direct_per_s"] > 0
    assert model["triton_per_s"] > model["direct_per_s"]  # two paths are one to the model
    assert model["refused_per_s"] == 0
    assert model["copied_bytes_per_s"] > 0
    assert model["own_s"] > 0
    ours = [region for region in found["regions"] if region["name"].startswith(f"shmbu-{os.getpid()}-")]
    stub = next(process for process in found["processes"] if process["program"] == f"stub of {MODEL} 1")
    mapped = [region for region in ours if {os.getpid(), stub["pid"]} <= set(region["pids"])]
    assert model["mapped_bytes"] in {region["byte_size"] for region in mapped}
    assert stub["mapped_bytes"] == sum(region["byte_size"] for region in mapped)
    assert any(stub["pid"] in pool["pids"] and pool["is_left_behind"] is False for pool in found["pools"])


def test_it_is_watched_in_a_terminal(loading_server: LoadingServer, metrics_url: str) -> None:
    with top_in_terminal("--metrics-url", metrics_url, "--interval", "0.5") as terminal:
        with requests(loading_server.server.grpc_url):
            terminal.wait_for(lambda screen: re.search(rf"^{MODEL} 1 +[1-9]\S* +[1-9]", screen, re.MULTILINE))
        quiet = terminal.wait_for(lambda screen: re.search(rf"^{MODEL} 1 +0 +0 +0 ", screen, re.MULTILINE))
        assert f"REQUESTS  of models with SHM_METRICS, at {metrics_url}" in quiet
        assert terminal.end(signal.SIGINT) == 0


@pytest.mark.needs_triton("2.51", "2.41 does not count failures by their reason")
def test_tritons_own_metrics_of_the_documentation_are_there(metrics_url: str) -> None:
    names = set(re.findall(r"nv_\w+", (ROOT / "docs" / "monitoring.md").read_text()))
    with urllib.request.urlopen(f"{metrics_url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    assert names
    assert {name for name in names if f"\n{name}{{" not in text} == set()
    assert 'nv_inference_request_failure{model="watched",reason="BACKEND",' in text
