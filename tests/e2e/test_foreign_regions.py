"""Plain tritonclient on the direct path: regions that it made and registered itself, named in one request parameter."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
HTTP_CODES = {"INVALID_ARGUMENT": "400", "NOT_FOUND": "404"}
MODEL = "direct_only"  # gives Y, which is X, and serves the direct path alone


class Region:
    """A region as a user of tritonclient makes it: no header, no token, a name at the server."""

    def __init__(self, client: Any, byte_size: int = 4 * PAGE, prefix: str = "foreign-") -> None:
        self.client = client
        self.byte_size = byte_size
        self.name = f"region-{secrets.token_hex(4)}"
        self.key = f"/{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        self.path = SHM / self.key.removeprefix("/")
        self.handle = shared_memory.create_shared_memory_region(self.name, self.key, byte_size, create_only=True)

    def register(self, name: str | None = None, offset: int = 0) -> None:
        self.client.register_system_shared_memory(name or self.name, self.key, self.byte_size - offset, offset)

    def write(self, array: npt.NDArray[Any], offset: int = 0) -> None:
        shared_memory.set_shared_memory_region(self.handle, [array], offset)

    def read(self, offset: int = 0, count: int = 4) -> list[float]:
        values: list[float] = shared_memory.get_contents_as_numpy(self.handle, np.float32, [count], offset).tolist()
        return values

    def replace(self) -> None:
        """Put another file, full of zeros, under the same key."""
        self.path.unlink()
        self.path.write_bytes(bytes(self.byte_size))

    def destroy(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.touch()  # for tritonclient to unlink
        shared_memory.destroy_shared_memory_region(self.handle)


class Wire:
    """tritonclient for one protocol, and the regions that were made with it."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        self.protocol = protocol
        module: Any = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        self.module = module
        self.client = module.InferenceServerClient(server.grpc_url if protocol == "grpc" else server.http_url)
        self.regions: list[Region] = []
        self.names: list[str] = []

    def region(self, *, registered: bool = True, **options: Any) -> Region:
        region = Region(self.client, **options)
        self.regions.append(region)
        if registered:
            region.register()
            self.names.append(region.name)
        return region

    def send(
        self,
        names: list[str],
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        *,
        model: str = MODEL,
        tensors: tuple[Any, ...] = (),
        **parameters: Any,
    ) -> Any:
        descriptor = {
            "v": 1,
            "model": model,
            "regions": [{"kind": "named", "name": name} for name in names],
            "inputs": inputs,
            "outputs": outputs,
        }
        return self.client.infer(model, list(tensors), parameters={"shm_io": json.dumps(descriptor), **parameters})

    def tensors_in(self, result: Any) -> list[str]:
        response = result.get_response()
        if self.protocol == "grpc":
            return [tensor.name for tensor in response.outputs]
        return [tensor["name"] for tensor in response.get("outputs", [])]

    def refused(self, action: Callable[[], object], code: str) -> str:
        """Return the message of a refusal with this code of Triton's."""
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


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[Wire]:
    wire = Wire(request.param, triton_server)
    yield wire
    wire.close()


ROW = np.array([1, 2, 3, 4], np.float32)
X_AT_0 = {"X": [0, 0, 16, "FP32", [4]]}
Y_BEHIND_IT = {"Y": [0, 1024, 16]}
Y_IN_THE_SECOND = {"Y": [1, 0, 16]}


def test_input_and_output_in_a_region_each(wire: Wire) -> None:
    source, target = wire.region(), wire.region()
    source.write(ROW)
    result = wire.send([source.name, target.name], X_AT_0, Y_IN_THE_SECOND)
    assert target.read() == [1, 2, 3, 4]
    assert wire.tensors_in(result) == []


def test_a_sparse_region_gets_its_memory_before_it_is_used(wire: Wire) -> None:
    region = wire.region()
    assert region.path.stat().st_blocks == 0
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert region.path.stat().st_blocks * 512 == region.byte_size


@tells_404
def test_a_file_that_was_removed_is_not_found(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    region.path.unlink()
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "NOT_FOUND")
    assert "regions[0] does not exist" in message


def test_memory_of_the_python_backend_cannot_be_reached(wire: Wire) -> None:
    region = wire.region(registered=False, prefix="triton_python_backend_shm_region_")
    region.write(ROW)
    before = region.path.read_bytes()
    with pytest.raises(InferenceServerException, match="reserved|memory of Triton's Python backend"):
        register_and_send(wire, region)  # newer servers refuse to register it in the first place
    assert region.path.read_bytes() == before


def register_and_send(wire: Wire, region: Region) -> None:
    region.register()
    wire.names.append(region.name)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)


def test_a_managed_region_cannot_be_reached_by_a_name(wire: Wire) -> None:
    region = ManagedRegion.create(PAGE)
    before = region.bytes().tobytes()
    wire.client.register_system_shared_memory("managed", region.segment.key, region.header.byte_size)
    try:
        spans = {"Y": [0, region.data_offset + 1024, 16]}
        message = wire.refused(
            lambda: wire.send(["managed"], {"X": [0, 0, 16, "FP32", [4]]}, spans), "INVALID_ARGUMENT"
        )
        assert "it is a managed region; name it by its key and token" in message
        assert region.bytes().tobytes() == before
    finally:
        wire.client.unregister_system_shared_memory("managed")
        region.segment.unlink()
        region.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_model_can_allow_another_user(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    os.chown(region.path, NOBODY, -1)
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "INVALID_ARGUMENT")
    assert f"it belongs to user {NOBODY}" in message
    wire.send([region.name], X_AT_0, Y_BEHIND_IT, model="strangers_only")
    assert region.read(1024) == [1, 2, 3, 4]
