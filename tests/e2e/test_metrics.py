"""What the metrics port says of models with the parameter SHM_METRICS."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient

from .eventually import eventually
from .loading_server import LoadingServer

MODEL = "measured"
X = np.arange(1000, dtype=np.float32)
ROOM = {"FILLED": X.nbytes, "COPIED": X.nbytes, "PASSED": X.nbytes}


def config(count: int = 1) -> str:
    outputs = ", ".join(f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in ROOM)
    return f"""
        backend: "python"
        input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true }} ]
        output [ {outputs} ]
        parameters {{ key: "SHM_PATHS" value: {{ string_value: "direct,triton-shm,inline" }} }}
        instance_group [ {{ kind: KIND_CPU count: {count} }} ]
        parameters {{ key: "SHM_METRICS" value: {{ string_value: "true" }} }}
    """


def figures(server: LoadingServer, model: str) -> Counter[str]:
    """Return what the model's metrics say, all sessions together: by name, and the label that only this name has."""
    found: Counter[str] = Counter()
    for name, labels, value in server.samples(model):
        own = [label for key, label in labels.items() if key not in ("model", "version", "session")]
        found[" ".join([name, *own])] += value  # type: ignore[assignment]  # a sum of floats
    return found


@pytest.fixture(scope="module")
def server(loading_server: LoadingServer) -> LoadingServer:
    loading_server.load_all("measured", {MODEL: config(), "measured_twice": config(2)})
    return loading_server


def test_everything_is_there_from_the_load_of_a_model_to_its_end(loading_server: LoadingServer) -> None:
    loading_server.load("unused", "measured", config())
    assert {name for name, value in figures(loading_server, "unused").items() if value == 0} > {
        "calls_total direct",
        "calls_total triton",
        "zero_copy_bytes_total",
        "copied_bytes_total",
        "own_seconds_bucket +Inf",
        "own_seconds_sum",
        "own_seconds_count",
        "mapped_bytes",
        "mapped_regions",
    }
    assert {(sample.labels["model"], sample.labels["version"]) for sample in loading_server.samples("unused")} == {
        ("unused", "1")
    }
    loading_server.grpc.unload_model("unused")
    eventually(lambda: not loading_server.samples("unused"))


def test_instances_have_series_of_their_own_that_add_up(server: LoadingServer) -> None:
    sent = 0

    def does_each_count(client: ShmClient) -> bool:
        nonlocal sent
        pending = [client.submit("measured_twice", {"X": X}, outputs=ROOM, path="direct") for _ in range(8)]
        sent += len(pending)
        for future in pending:
            future.result().release()
        eventually(lambda: figures(server, "measured_twice")["calls_total direct"] == sent)
        samples = server.samples("measured_twice")
        assert len({sample.labels["session"] for sample in samples}) == 2
        return len({each.labels["session"] for each in samples if each.name == "calls_total" and each.value}) == 2

    with ShmClient(server.server.grpc_url, timeout_s=30) as client:
        eventually(partial(does_each_count, client))


@pytest.mark.needs_triton("2.51", "2.41 does not count failures by their reason")
def test_tritons_own_metrics_of_the_documentation_are_there(server: LoadingServer) -> None:
    names = set(re.findall(r"nv_\w+", (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()))
    with urllib.request.urlopen(f"http://{server.server.metrics_url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    assert names
    assert {name for name in names if f"\n{name}{{" not in text} == set()
    assert f'nv_inference_request_failure{{model="{MODEL}",reason="BACKEND",' in text
