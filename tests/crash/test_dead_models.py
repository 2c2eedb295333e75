"""A dead process of any Python model is found by all who ask, and no probe looks like trouble to an alert."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from scripts.tools.processes import children, command_line
from shm_backend_utils.cli.doctor import examine
from shm_backend_utils.client import ShmClient, server_calls
from shm_backend_utils.client.errors import LivenessUnknownError
from shm_backend_utils.server import EmbeddedServer
from tests.releases import calls_dead_models_ready, outlives_models
from tests.unit.harness.folders import SESSION, folder_of

ROOT: Final = Path(__file__).resolve().parents[2]
WOKEN_FOR: Final = (ROOT / "docs/monitoring.md").read_text().partition("## Alerts")[2]
ALERTS: Final = set(re.findall(r"rate\((\w+)", WOKEN_FOR)) - {"shm_backend_utils_calls_total"}
CPU: Final = 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n'
TENSORS: Final = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] optional: OPTIONAL } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
PATHS: Final = (
    TENSORS.replace("OPTIONAL", "true")
    + 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }\n'
    + 'parameters { key: "SHM_METRICS" value: { string_value: "true" } }\n'
)
PLAIN: Final = TENSORS.replace("OPTIONAL", "false")
DECOUPLED: Final = "model_transaction_policy { decoupled: true }\n"
STOCK: Final = """
class TritonPythonModel:
    def execute(self, requests): raise ValueError("a probe must not get here")
"""
MODELS: Final = {
    "session": (SESSION, CPU + PATHS),
    "decoupled": (SESSION.replace("return self.session.serve", "self.session.serve_streams"), CPU + PATHS + DECOUPLED),
    "sequence": (SESSION, CPU + PATHS + "sequence_batching { max_sequence_idle_microseconds: 1000000 }\n"),
    "twins": (SESSION, CPU.replace("{ kind", "{ count: 2 kind") + PATHS),
    "stock": (STOCK, CPU + PLAIN),
    "stock_decoupled": (STOCK, CPU + PLAIN + DECOUPLED),
}
ENSEMBLE: Final = """platform: "ensemble"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "stock" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }
"""


class Served:
    """A server of this file's models, and what is asked of it."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.urls = {"grpc": server.grpc_url, "http": f"http://{server.http_url}"}

    def is_ready(self, model: str, protocol: str) -> bool:
        with ShmClient(self.urls[protocol]) as client:
            return client.is_model_ready(model)

    def codes(self, protocol: str, model: str | None = None) -> dict[str, set[str]]:
        """Return what the doctor finds fatal, for each model that it finds something of."""
        found: dict[str, set[str]] = {}
        for each in examine(self.urls[protocol], model).findings:
            if each.model and each.trouble.is_fatal:
                found.setdefault(each.model, set()).add(each.trouble.code)
        return found

    def processes(self, model: str) -> list[int]:
        return [pid for pid in children(self.server.pid) if f"/{model}/1/model.py" in command_line(pid)]

    def failures(self) -> dict[str, float]:
        """Return the metrics that the documented alerts look at, by model, added up."""
        with urllib.request.urlopen(f"http://{self.server.metrics_url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        total: dict[str, float] = {}
        for name in ALERTS:
            for model, count in re.findall(rf'^{name}\{{.*model="(\w+)".*\}} (\S+)$', text, re.MULTILINE):
                total[model] = total.get(model, 0) + float(count)
        return {model: count for model, count in total.items() if count}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dead_models")
    for name, (code, config) in MODELS.items():
        folder_of(folder / "models", code, config, name)
    folder_of(folder / "models", "", ENSEMBLE, "whole")
    with EmbeddedServer.start(folder / "models", log_file=folder / "server.log", numpy="own") as server:
        yield Served(server)
        os.kill(server.pid, signal.SIGKILL)  # with a dead stub, it would take half a minute to stop
        server.wait()


def test_all_that_live_are_ready_and_no_probe_counts_as_a_failure(served: Served, protocol: str) -> None:
    assert {"shm_backend_utils_refusals_total", "nv_inference_request_failure"} == ALERTS
    before = served.failures()
    for model in (*MODELS, "whole"):
        assert served.is_ready(model, protocol), model
    (base,) = yaml.safe_load_all((ROOT / "docs/deploy/kubernetes/base/deployment.yaml").read_text())
    triton = base["spec"]["template"]["spec"]["containers"][0]
    program, _, *_ = triton["readinessProbe"]["exec"]["command"]
    words = [sys.executable, ROOT / "docs/deploy/docker" / program, served.urls[protocol], *MODELS]
    assert subprocess.run(words, check=False).returncode == 0
    assert served.failures() == before


def test_a_repository_with_ordinary_models_passes(served: Served, protocol: str) -> None:
    assert served.codes(protocol) == {}
    assert served.codes(protocol, "stock") == {}


@calls_dead_models_ready
def test_who_sees_no_process_says_so_of_models_without_a_session(
    served: Served, protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_calls, "_PROC", tmp_path)
    assert served.is_ready("session", protocol)
    assert served.is_ready("sequence", protocol)
    with pytest.raises(LivenessUnknownError, match="cannot tell from here whether the process of model 'stock'"):
        served.is_ready("stock", protocol)
    told = examine(served.urls[protocol], "stock").findings
    assert "life-unknown" in {each.trouble.code for each in told if each.model}


@outlives_models
@pytest.mark.parametrize("model", MODELS)
def test_a_dead_process_is_found(served: Served, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    victim, *others = served.processes(model)
    os.kill(victim, signal.SIGKILL)
    for protocol in ("grpc", "http"):
        assert not served.is_ready(model, protocol)
        assert served.codes(protocol, model)[model] == {"dead-instance" if others else "dead-stub"}
    if model == "stock":
        assert not served.is_ready("whole", "grpc")
    monkeypatch.setattr(server_calls, "_PROC", tmp_path)
    if model in ("session", "sequence"):  # of which a request tells, too
        assert not served.is_ready(model, "http")
        assert served.codes("http", model)[model] == {"dead-stub"}
