"""Models that complete their configuration by auto_complete; and models that do not load, as a harness says it, too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from tests.releases import gives_up_loading
from tests.unit.harness.folders import BAD_CODE, folder_of

from .loading_server import LoadingServer

X = np.arange(3, dtype=np.float32)
TENSORS = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 3 ] OPTIONAL } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
REQUIRED = TENSORS.replace("OPTIONAL", "")
SERVED: Final[dict[str, tuple[str | None, dict[str, bool], str]]] = {
    "without_a_config": (None, {"X": True, "SHM": True}, "direct"),
    "without_a_config_with_batches": (None, {"X": True, "SHM": True}, "direct"),
    "with_paths": ('parameters { key: "SHM_PATHS" value: { string_value: "direct,inline" } }', {"X": True}, "direct"),
    "with_tensors": (TENSORS.replace("OPTIONAL", "optional: true"), {"X": True, "SHM": True}, "direct"),
    "without_the_direct_path": (
        REQUIRED + 'parameters { key: "SHM_PATHS" value: { string_value: "inline" } }',
        {"X": False},
        "inline",
    ),
}
"""A configuration, the inputs that the server then has, each optional or not, and the path that a call takes."""


@pytest.fixture(scope="module")
def server(loading_server: LoadingServer) -> LoadingServer:
    loading_server.load_all("self_described", {name: config for name, (config, _, _) in SERVED.items()})
    return loading_server


@pytest.fixture
def client(server: LoadingServer) -> Iterator[ShmClient]:
    with ShmClient(server.server.grpc_url, timeout_s=30, inline_bytes=0) as client:
        yield client


@pytest.mark.parametrize("model", SERVED)
def test_the_server_has_the_inputs_that_are_needed_and_serves_every_path(
    server: LoadingServer, client: ShmClient, model: str
) -> None:
    _, expected, best = SERVED[model]
    config = server.grpc.get_model_config(model, as_json=True)["config"]
    assert {tensor["name"]: tensor.get("optional", False) for tensor in config["input"]} == expected
    x = np.stack([X, 2 * X]) if "batches" in model else X
    paths: list[tuple[PathName, str]] = [("auto", best), ("inline", "inline")]
    for path, taken in paths:
        with client.infer(model, {"X": x}, path=path) as result:
            assert result.path == taken
            np.testing.assert_array_equal(result["Y"], x)


@gives_up_loading
@pytest.mark.parametrize(
    ("model", "config", "complaint"),
    [
        ("required", REQUIRED, "ModelError: input 'X' of model 'required' is not optional"),
        ("taken", REQUIRED.replace("X", "SHM"), "model 'taken' has input SHM (TYPE_FP32 [3], not optional)"),
    ],
)
def test_a_config_that_contradicts_keeps_the_model_from_loading_and_the_log_says_why(
    loading_server: LoadingServer, client: ShmClient, model: str, config: str, complaint: str
) -> None:
    with pytest.raises(InferenceServerException, match=f"load failed for model '{model}'"):
        loading_server.load(model, "self_described", config)
    assert not client.is_model_ready(model)
    assert complaint in loading_server.server.log_tail()


@gives_up_loading
@pytest.mark.parametrize("what", BAD_CODE)
def test_a_server_says_so(loading_server: LoadingServer, what: str) -> None:
    code, said, _ = BAD_CODE[what]
    folder = folder_of(loading_server.models, code)
    try:
        with pytest.raises(InferenceServerException) as told:
            loading_server.grpc.load_model("m")
        expected = f"load failed for model 'm': version 1 is at UNAVAILABLE state: {said}"
        assert told.value.message().startswith(expected)
    finally:
        shutil.rmtree(folder)
