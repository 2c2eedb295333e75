"""Models that are unloaded and loaded again: nothing of theirs is left, and their clients go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, ShmClient

from .eventually import all_memory_comes_back, eventually
from .loading_server import LoadingServer, side_by_side

NAMES = ("delegate", "rows", "batch_rows", "frames_of")
X = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture
def grpc(loading_server: LoadingServer) -> Any:
    for name in NAMES:
        loading_server.copy(name, name)
    side_by_side(loading_server.grpc.load_model, NAMES)
    return loading_server.grpc


@pytest.fixture
def client(loading_server: LoadingServer) -> Iterator[ShmClient]:
    with ShmClient(loading_server.server.grpc_url, timeout_s=30) as client:
        yield client


def delegated(client: ShmClient) -> int:
    parameters = {"way": "forward_rows", "model": "rows"}
    with client.infer("delegate", {"X": X}, outputs={"Y": 16, "FACTS": 2048}, parameters=parameters) as result:
        assert result["Y"].tolist() == (2 * X).tolist()
        pid: int = json.loads(result["FACTS"].tobytes())["pid"]
        return pid


def batched_and_streamed(client: ShmClient) -> None:
    rows = [np.full((1, 4), 1 + index, np.float32) for index in range(8)]
    futures = [client.submit("batch_rows", {"X": row}, outputs={"Y": 16}) for row in rows]
    assert [future.result()["Y"][0, 0] for future in futures] == [2 * row[0, 0] for row in rows]
    results = client.stream("frames_of", {"X": X}, outputs={"Y": 16}, parameters={"count": 9})
    assert [result["Y"][0] for result in results] == [1 + index for index in range(9)]


def scratch_of(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"shmbu-{pid}-*"))


def test_nothing_is_left_of_a_model_that_was_unloaded_and_its_clients_go_on(grpc: Any, client: ShmClient) -> None:
    pid = delegated(client)
    batched_and_streamed(client)
    assert scratch_of(pid)
    side_by_side(grpc.unload_model, NAMES)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert not scratch_of(pid)
    with pytest.raises(InferenceError):
        delegated(client)
    side_by_side(grpc.load_model, NAMES)
    assert delegated(client) != pid
    batched_and_streamed(client)
    all_memory_comes_back(client)


def test_a_model_that_was_loaded_with_another_configuration_is_asked_about_anew(grpc: Any, client: ShmClient) -> None:
    """The caller has learned what the other model takes; the first refusal makes it look again."""
    pid = delegated(client)
    config = json.loads(json.dumps(grpc.get_model_config("rows", as_json=True)["config"]))
    config["max_batch_size"] = 2
    grpc.load_model("rows", config=json.dumps(config))
    assert delegated(client) == pid
    grpc.unload_model("rows")
    for complaint in ("rows", "model 'rows' cannot be called: the server has no such model ready"):
        with pytest.raises(InferenceError, match=complaint):
            delegated(client)
