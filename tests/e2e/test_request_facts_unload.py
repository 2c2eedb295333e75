"""Models that are unloaded and loaded again: nothing of theirs is left, and their clients go on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, ShmClient

from .eventually import all_memory_comes_back, eventually
from .loading_server import LoadingServer, side_by_side

X = np.array([1, 2, 3, 4], np.float32)


def delegated(client: ShmClient) -> int:
    parameters = {"way": "forward_rows", "model": "rows"}
    with client.infer("delegate", {"X": X}, outputs={"Y": 16, "FACTS": 2048}, parameters=parameters) as result:
        assert result["Y"].tolist() == (2 * X).tolist()
        pid: int = json.loads(result["FACTS"].tobytes())["pid"]
        return pid


def scratch_of(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"shmbu-{pid}-*"))


def test_nothing_is_left_of_a_model_that_was_unloaded_and_one_loaded_otherwise_is_asked_about_anew(
    loading_server: LoadingServer,
) -> None:
    """The caller has learned what the other model takes; the first refusal makes it look again."""
    names, grpc = ("delegate", "rows"), loading_server.grpc
    for name in names:
        loading_server.copy(name, name)
    side_by_side(grpc.load_model, names)
    with ShmClient(loading_server.server.grpc_url, timeout_s=30) as client:
        pid = delegated(client)
        config = json.loads(json.dumps(grpc.get_model_config("rows", as_json=True)["config"]))
        config["max_batch_size"] = 2
        grpc.load_model("rows", config=json.dumps(config))
        assert delegated(client) == pid
        grpc.unload_model("rows")
        for complaint in ("rows", "model 'rows' cannot be called: the server has no such model ready"):
            with pytest.raises(InferenceError, match=complaint):
                delegated(client)
        assert scratch_of(pid)
        grpc.unload_model("delegate")
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        assert not scratch_of(pid)
        with pytest.raises(InferenceError):
            delegated(client)
        side_by_side(grpc.load_model, names)
        assert delegated(client) != pid
        all_memory_comes_back(client)
