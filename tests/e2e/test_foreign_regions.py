"""Plain tritonclient on the direct path: regions that it made and registered itself, named in one request parameter."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.server import EmbeddedServer
from tests.releases import tells_404

from .plain_client import PlainClient, PlainRegion

PAGE = 4096
NOBODY = 65534
ROW = np.array([1, 2, 3, 4], np.float32)
HTTP_CODES = {"INVALID_ARGUMENT": "400", "NOT_FOUND": "404"}


class Wire(PlainClient):
    """What a user of tritonclient asks on the direct path: Y, which is X, of a model that serves this path alone."""

    def send(self, name: str, model: str = "direct_only", y_offset: int = 1024, target: str | None = None) -> Any:
        descriptor = {
            "v": 1,
            "model": model,
            "regions": [{"kind": "named", "name": each} for each in (name, target) if each],
            "inputs": {"X": [0, 0, 16, "FP32", [4]]},
            "outputs": {"Y": [int(target is not None), y_offset, 16]},
        }
        return self.client.infer(model, [], parameters={"shm_io": json.dumps(descriptor)})

    def refused(self, action: Callable[[], object], code: str) -> str:
        with pytest.raises(InferenceServerException) as refusal:
            action()
        codes = {"grpc": f"StatusCode.{code}", "http": HTTP_CODES[code]}
        assert refusal.value.status() == codes[self.protocol]
        message: str = refusal.value.message()
        assert not [region.key for region in self.regions if region.key.removeprefix("/") in message]
        return message


@pytest.fixture
def wire(protocol: str, triton_server: EmbeddedServer) -> Iterator[Wire]:
    with contextlib.closing(Wire(protocol, triton_server)) as wire:
        yield wire


@tells_404
def test_a_sparse_region_gets_its_memory_and_a_file_that_was_removed_is_not_found(wire: Wire) -> None:
    region = wire.region(4 * PAGE)
    assert region.path.stat().st_blocks == 0
    wire.send(region.name)
    assert region.path.stat().st_blocks * 512 == region.byte_size
    region.path.unlink()
    assert "regions[0] does not exist" in wire.refused(lambda: wire.send(region.name), "NOT_FOUND")


def test_a_name_means_what_it_stands_for_now_whatever_it_stood_for_before(wire: Wire) -> None:
    """A name is registered anew for another part of an object, and for another object, as large or smaller."""
    source = wire.region(PAGE)
    source.write(ROW)
    objects = [PlainRegion(3 * PAGE), PlainRegion(3 * PAGE)]
    wire.regions += objects
    name = objects[0].name
    for number, page in ((0, 0), (0, 1), (1, 1), (1, 0), (0, 2), (0, 0)):
        wire.client.register_system_shared_memory(name, objects[number].key, (3 - page) * PAGE, offset=page * PAGE)
        wire.send(source.name, target=name)
        expected = np.zeros((2, 3, PAGE // 4), np.float32)
        expected[number, page, 256:260] = ROW
        found = [each.view(np.float32, [3, PAGE // 4]) for each in objects]
        np.testing.assert_array_equal(found, expected)
        found[number][page, 256:260] = 0
        wire.client.unregister_system_shared_memory(name)
        with pytest.raises(InferenceServerException, match="not registered"):
            wire.send(source.name, target=name)


def test_memory_of_the_python_backend_cannot_be_reached(wire: Wire) -> None:
    region = PlainRegion(4 * PAGE, "triton_python_backend_shm_region_")
    wire.regions.append(region)
    region.write(ROW)
    before = region.path.read_bytes()

    def register_and_send() -> None:
        wire.register(region)
        wire.send(region.name)

    with pytest.raises(InferenceServerException, match="reserved|memory of Triton's Python backend"):
        register_and_send()  # newer servers refuse to register it in the first place
    assert region.path.read_bytes() == before


def test_a_managed_region_cannot_be_reached_by_a_name(wire: Wire) -> None:
    region = ManagedRegion.create(PAGE)
    before = region.bytes().tobytes()
    wire.client.register_system_shared_memory("managed", region.segment.key, region.header.byte_size)
    try:
        y_offset = region.data_offset + 1024
        message = wire.refused(lambda: wire.send("managed", y_offset=y_offset), "INVALID_ARGUMENT")
        assert "it is a managed region; name it by its key and token" in message
        assert region.bytes().tobytes() == before
    finally:
        wire.client.unregister_system_shared_memory("managed")
        region.segment.unlink()
        region.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_model_can_allow_another_user(wire: Wire) -> None:
    region = wire.region(4 * PAGE)
    region.write(ROW)
    os.chown(region.path, NOBODY, -1)
    message = wire.refused(lambda: wire.send(region.name), "INVALID_ARGUMENT")
    assert f"it belongs to user {NOBODY}" in message
    wire.send(region.name, "strangers_only")
    assert region.view(np.float32, [4], 1024).tolist() == ROW.tolist()
