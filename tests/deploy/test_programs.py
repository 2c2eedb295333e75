"""What is in the images beside the library, run against a server as the manifests run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
import yaml

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models
from shm_backend_utils.server import EmbeddedServer, install
from tests.crash.processes import stub_of

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
PROBE = DEPLOY / "docker" / "models-answer"
APPLICATION = DEPLOY / "docker" / "application.py"
SCALED_BY = "scaled-keda/scaledobject.yaml", "scaled-adapter/adapter-values.yaml"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("server")
    models = copy_models([REPOSITORY / "identity", REPOSITORY / "multiply"], folder / "models")
    with EmbeddedServer.start(models, log_file=folder / "server.log", numpy="own") as server:
        yield server


def probed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROBE, *words], capture_output=True, text=True, check=False)


def says_it_is_ready(server: EmbeddedServer) -> bool:
    """Return what Triton's own endpoints say, which Kubernetes' probes are usually told to ask: both the same."""
    answers = set()
    for path in ("health/ready", "models/multiply/ready"):
        try:
            urllib.request.urlopen(f"http://{server.http_url}/v2/{path}", timeout=10).close()
            answers.add(True)
        except HTTPError:
            answers.add(False)
    (is_ready,) = answers
    return is_ready


@pytest.mark.parametrize("region", ["sealed", "system", "auto"])
def test_the_application_gets_its_results_without_copies(own_server: EmbeddedServer, region: str) -> None:
    wanted = {"TRITON_URL": own_server.grpc_url, "REGION": region, "CALLS": "2", "GROUP_ID": str(os.getgid())}
    environment = {**os.environ, **wanted}
    done = subprocess.run([sys.executable, APPLICATION], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["call 1: path direct, right", "call 2: path direct, right"]


def test_the_probe_of_the_manifests_tells_dead_models_from_live_ones(own_server: EmbeddedServer) -> None:
    (base,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "deployment.yaml").read_text())
    triton = base["spec"]["template"]["spec"]["containers"][0]
    for probe in ("readinessProbe", "livenessProbe"):
        program, _, *models = triton[probe]["exec"]["command"]
        assert program == PROBE.name
        done = probed(f"http://{own_server.http_url}", *models)
        assert (done.returncode, done.stderr) == (0, "")
    victim = stub_of(own_server, "multiply")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    tells_of_the_dead = install().is_at_least("2.68")
    assert says_it_is_ready(own_server) is not tells_of_the_dead
    done = probed(f"http://{own_server.http_url}", *models)
    assert done.returncode == 1
    assert done.stderr == "not loaded, or their processes have died: multiply\n"
    assert says_it_is_ready(own_server) is not tells_of_the_dead  # also now that a request has failed


def test_the_metric_is_one_that_triton_has(own_server: EmbeddedServer) -> None:
    with urllib.request.urlopen(f"http://{own_server.metrics_url}/metrics", timeout=10) as reply:
        served = set(re.findall(r"^# TYPE (\w+) gauge", reply.read().decode(), re.MULTILINE))
    scaled = "".join((DEPLOY / "kubernetes" / "overlays" / name).read_text() for name in SCALED_BY)
    assert set(re.findall(r"\bnv_\w+", scaled)) == {"nv_inference_pending_request_count"}
    assert "nv_inference_pending_request_count" in served
