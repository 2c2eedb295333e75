"""The server is killed and comes back, or somebody unregisters its memory, under a client of registered models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_shm_client
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..e2e.eventually import eventually
from .registered import SomebodyElse

MODELS = Path(__file__).resolve().parents[1] / "models"
X = np.arange(40, dtype=np.float32).reshape(10, 4)
N = np.full((10, 1), 2)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> Iterator[MortalServer]:
    models = copy_models((MODELS / "rows", MODELS / "ordinary"), tmp_path_factory.mktemp("mortal") / "models")
    with MortalServer(models, **options | {"log_file": models.with_name("server.log")}) as mortal:
        yield mortal


def register(client: Any) -> None:
    inputs = [("X", (4,), np.float32), ("N", (1,), np.int64)]
    client.register_shm_model("rows", inputs[:1], [("DOUBLED", (4,), np.float32)], 4, 2)
    client.register_shm_model("ordinary", inputs, [("Y", (4,), np.float32)], 4, 2)


def infer(client: Any) -> None:
    np.testing.assert_array_equal(client.infer_shm("rows", {"X": X})["DOUBLED"], X * 2)
    np.testing.assert_array_equal(client.infer_shm("ordinary", {"X": X, "N": N})["Y"], X * 2)


def is_answered(client: TritonSHMClient) -> bool:
    try:
        infer(client)
    except InferShmError:
        return False
    return True


def test_registered_models_outlive_the_server(mortal: MortalServer) -> None:
    with TritonSHMClient(mortal.server.grpc_url) as client, TritonSHMClient(mortal.server.grpc_url) as idle:
        register(client)
        register(idle)
        infer(client)
        infer(idle)
        mortal.kill()
        for model, inputs in (("rows", {"X": X}), ("ordinary", {"X": X, "N": N})):
            with pytest.raises(InferShmError) as caught:
                client.infer_shm(model, inputs, client_timeout=30)
            assert isinstance(caught.value.__cause__, ConnectionError)
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        mortal.come_back()
        eventually(lambda: is_answered(client))
        infer(client)
        eventually(lambda: is_answered(idle))


def test_what_somebody_else_unregisters_is_registered_again(mortal: MortalServer) -> None:
    """The original's model fails from then on."""
    with (
        SomebodyElse.at(mortal.server) as somebody,
        TritonSHMClient(mortal.server.grpc_url) as ours,
        triton_shm_client.TritonSHMClient(mortal.server.grpc_url) as theirs,
    ):
        register(ours)
        register(theirs)
        infer(ours)
        infer(theirs)
        somebody.unregister_all()
        infer(ours)
        with pytest.raises((RuntimeError, InferenceServerException), match="Unable to find shared memory region"):
            theirs.infer_shm("ordinary", {"X": X[:4], "N": N[:4]})
