"""The sample models for batches, streams, strings, and models that call each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer

from .flavours import AnyClient
from .plain_client import PlainClient

PHOTOGRAPH = np.random.default_rng(0).integers(0, 256, (300, 700, 3), np.uint8)
NORMALIZED_BYTES = 3 * 224 * 224 * 4
OUTPUTS_BEGIN = 2**20
EACH_PATH: tuple[PathName, ...] = ("triton-shm", "inline")


class Ensemble(PlainClient):
    """The ensemble as a client sees it that registers a region of its own and writes the descriptor itself."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        super().__init__(protocol, server)
        self.own = self.region(OUTPUTS_BEGIN + NORMALIZED_BYTES)
        self.own.write(PHOTOGRAPH)

    def infer(self, step: str, inputs: dict[str, Any], outputs: dict[str, Any], *, in_band: bool) -> dict[str, Any]:
        """Send the photograph in band or not at all, and a descriptor for a step; return what came back in band."""
        tensors = [self.in_band("IMAGE", PHOTOGRAPH)] if in_band else []
        regions = [{"kind": "named", "name": self.own.name}]
        descriptor = {"v": 1, "model": step, "regions": regions, "inputs": inputs, "outputs": outputs}
        result = self.client.infer("ensemble_pipeline", tensors, parameters={"shm_io": json.dumps(descriptor)})
        return {name: tensor.tolist() for name, tensor in self.tensors_of(result).items()}


@pytest.fixture
def ensemble(protocol: str, triton_server: EmbeddedServer) -> Iterator[Ensemble]:
    with contextlib.closing(Ensemble(protocol, triton_server)) as ensemble:
        yield ensemble


@pytest.fixture
def expected(any_client: AnyClient) -> dict[str, list[float]]:
    """Return what the pipeline says of the photograph, and so does the ensemble."""
    result = any_client.infer("pipeline", {"IMAGE": PHOTOGRAPH})
    found = {name: result[name][0].tolist() for name in ("MEAN", "STD")}
    for path in EACH_PATH:
        with any_client.infer("ensemble_pipeline", {"IMAGE": PHOTOGRAPH}, path=path) as result:
            assert {name: array.tolist() for name, array in result.items()} == found
    return found


def test_a_descriptor_gives_an_ensemble_its_first_input(ensemble: Ensemble, expected: dict[str, list[float]]) -> None:
    image = {"IMAGE": [0, 0, PHOTOGRAPH.nbytes, "UINT8", list(PHOTOGRAPH.shape)]}
    assert ensemble.infer("image_resize_normalize", image, {}, in_band=False) == expected


@pytest.mark.needs_triton("2.51", "2.41 wants every output of an ensemble from its steps: a deadlock")
def test_a_descriptor_takes_an_ensembles_output(ensemble: Ensemble, expected: dict[str, list[float]]) -> None:
    answered = ensemble.infer("batch_statistics", {}, {"MEAN": [0, OUTPUTS_BEGIN, 12]}, in_band=True)
    assert ensemble.own.view(np.float32, [3], OUTPUTS_BEGIN).tolist() == expected["MEAN"]
    assert answered == {"STD": expected["STD"]}
