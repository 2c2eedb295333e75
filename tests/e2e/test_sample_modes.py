"""The sample models for batches, streams, strings, and models that call each other."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.server import EmbeddedServer

from .flavours import AnyClient

RANDOM = np.random.default_rng(0)
PHOTOGRAPH = RANDOM.integers(0, 256, (300, 700, 3), np.uint8)
NORMALIZED_BYTES = 3 * 224 * 224 * 4
OUTPUTS_BEGIN = 2**20


@pytest.mark.parametrize("ensemble_path", ["triton-shm", "inline"])
def test_so_does_the_ensemble(any_client: AnyClient, ensemble_path: PathName) -> None:
    expected = any_client.infer("pipeline", {"IMAGE": PHOTOGRAPH})
    with any_client.infer("ensemble_pipeline", {"IMAGE": PHOTOGRAPH}, path=ensemble_path) as result:
        np.testing.assert_array_equal([result["MEAN"]], expected["MEAN"])
        np.testing.assert_array_equal([result["STD"]], expected["STD"])


class Ensemble:
    """The ensemble as a client sees it that registers a region of its own and writes the descriptor itself."""

    def __init__(self, server: EmbeddedServer, protocol: str) -> None:
        self.is_grpc = protocol == "grpc"
        self.module: Any = tritonclient.grpc if self.is_grpc else tritonclient.http
        self.client = self.module.InferenceServerClient(server.grpc_url if self.is_grpc else server.http_url)
        self.name = f"ensemble-{os.getpid()}-{secrets.token_hex(4)}"
        size = OUTPUTS_BEGIN + NORMALIZED_BYTES
        self.region = shared_memory.create_shared_memory_region(self.name, f"/{self.name}", size, create_only=True)
        shared_memory.set_shared_memory_region(self.region, [PHOTOGRAPH])
        self.client.register_system_shared_memory(self.name, f"/{self.name}", size)

    def infer(self, step: str, inputs: dict[str, Any], outputs: dict[str, Any], *, in_band: bool) -> dict[str, Any]:
        """Send the photograph in band or not at all, and a descriptor for a step; return what came back in band."""
        tensors = []
        if in_band:
            tensors = [self.module.InferInput("IMAGE", list(PHOTOGRAPH.shape), "UINT8")]
            tensors[0].set_data_from_numpy(PHOTOGRAPH)
        regions = [{"kind": "named", "name": self.name}]
        descriptor = {"v": 1, "model": step, "regions": regions, "inputs": inputs, "outputs": outputs}
        result = self.client.infer("ensemble_pipeline", tensors, parameters={"shm_io": json.dumps(descriptor)})
        response = result.get_response()
        names = (
            [each.name for each in response.outputs] if self.is_grpc else [each["name"] for each in response["outputs"]]
        )
        return {name: result.as_numpy(name) for name in names}

    def memory(self) -> npt.NDArray[np.float32]:
        copy: npt.NDArray[np.float32] = shared_memory.get_contents_as_numpy(
            self.region, np.float32, [3], offset=OUTPUTS_BEGIN
        ).copy()
        return copy

    def close(self) -> None:
        unregister_when_free(lambda: self.client.unregister_system_shared_memory(self.name))
        shared_memory.destroy_shared_memory_region(self.region)
        self.client.close()


@pytest.fixture
def ensemble(protocol: str, triton_server: EmbeddedServer) -> Iterator[Ensemble]:
    ensemble = Ensemble(triton_server, protocol)
    yield ensemble
    ensemble.close()


@pytest.fixture
def expected(grpc_client: ShmClient) -> dict[str, list[float]]:
    result = grpc_client.infer("pipeline", {"IMAGE": PHOTOGRAPH})
    return {name: result[name][0].tolist() for name in ("MEAN", "STD")}


def as_lists(tensors: dict[str, Any]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_a_descriptor_gives_the_first_step_of_an_ensemble_its_input(
    ensemble: Ensemble, expected: dict[str, list[float]]
) -> None:
    image = {"IMAGE": [0, 0, PHOTOGRAPH.nbytes, "UINT8", list(PHOTOGRAPH.shape)]}
    assert as_lists(ensemble.infer("image_resize_normalize", image, {}, in_band=False)) == expected


in_an_ensemble = pytest.mark.needs_triton("2.51", "2.41 wants every output of an ensemble from its steps: a deadlock")


@in_an_ensemble
def test_a_descriptor_takes_the_output_of_the_last_step_of_an_ensemble(
    ensemble: Ensemble, expected: dict[str, list[float]]
) -> None:
    answered = ensemble.infer("batch_statistics", {}, {"MEAN": [0, OUTPUTS_BEGIN, 12]}, in_band=True)
    assert ensemble.memory().tolist() == expected["MEAN"]
    assert as_lists(answered) == {"STD": expected["STD"]}
