"""Plain tritonclient on the direct path: regions that it made and registered itself, named in one request parameter."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.server import EmbeddedServer
from tests.releases import tells_404

SHM = Path("/dev/shm")
PAGE = 4096
NOBODY = 65534
ROW = np.array([1, 2, 3, 4], np.float32)
MODEL = "direct_only"  # gives Y, which is X, and serves the direct path alone
HTTP_CODES = {"INVALID_ARGUMENT": "400", "NOT_FOUND": "404"}


class Region:
    """A region as a user of tritonclient makes it: no header, no token, a name at the server."""

    byte_size = 4 * PAGE

    def __init__(self, prefix: str = "foreign-") -> None:
        self.name = f"region-{secrets.token_hex(4)}"
        self.key = f"/{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        self.path = SHM / self.key.removeprefix("/")
        self.handle = shared_memory.create_shared_memory_region(self.name, self.key, self.byte_size, create_only=True)

    def write(self) -> None:
        shared_memory.set_shared_memory_region(self.handle, [ROW])

    def read(self) -> list[float]:
        values: list[float] = shared_memory.get_contents_as_numpy(self.handle, np.float32, [4], 1024).tolist()
        return values

    def destroy(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.touch()  # for tritonclient to unlink
        shared_memory.destroy_shared_memory_region(self.handle)


class Wire:
    """tritonclient for one protocol, and the regions that were made with it."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        self.protocol = protocol
        module: Any = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        self.client = module.InferenceServerClient(server.grpc_url if protocol == "grpc" else server.http_url)
        self.regions: list[Region] = []
        self.names: list[str] = []

    def region(self) -> Region:
        region = Region()
        self.regions.append(region)
        self.register(region)
        return region

    def register(self, region: Region) -> None:
        self.client.register_system_shared_memory(region.name, region.key, region.byte_size)
        self.names.append(region.name)

    def send(self, name: str, model: str = MODEL, y_offset: int = 1024) -> Any:
        descriptor = {
            "v": 1,
            "model": model,
            "regions": [{"kind": "named", "name": name}],
            "inputs": {"X": [0, 0, 16, "FP32", [4]]},
            "outputs": {"Y": [0, y_offset, 16]},
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

    def close(self) -> None:
        for name in self.names:
            self.client.unregister_system_shared_memory(name)
        for region in self.regions:
            region.destroy()
        self.client.close()


@pytest.fixture
def wire(protocol: str, triton_server: EmbeddedServer) -> Iterator[Wire]:
    wire = Wire(protocol, triton_server)
    yield wire
    wire.close()


def test_a_sparse_region_gets_its_memory_before_it_is_used(wire: Wire) -> None:
    region = wire.region()
    assert region.path.stat().st_blocks == 0
    wire.send(region.name)
    assert region.path.stat().st_blocks * 512 == region.byte_size


@tells_404
def test_a_file_that_was_removed_is_not_found(wire: Wire) -> None:
    region = wire.region()
    region.write()
    wire.send(region.name)
    region.path.unlink()
    assert "regions[0] does not exist" in wire.refused(lambda: wire.send(region.name), "NOT_FOUND")


def test_memory_of_the_python_backend_cannot_be_reached(wire: Wire) -> None:
    region = Region("triton_python_backend_shm_region_")
    wire.regions.append(region)
    region.write()
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
    region = wire.region()
    region.write()
    os.chown(region.path, NOBODY, -1)
    message = wire.refused(lambda: wire.send(region.name), "INVALID_ARGUMENT")
    assert f"it belongs to user {NOBODY}" in message
    wire.send(region.name, "strangers_only")
    assert region.read() == ROW.tolist()
