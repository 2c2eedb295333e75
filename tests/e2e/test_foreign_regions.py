"""Plain tritonclient on the direct path: regions that it made and registered itself, named in one request parameter."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
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
        written: Callable[[Any], str] = json.dumps,
        **parameters: Any,
    ) -> Any:
        descriptor = {
            "v": 1,
            "model": model,
            "regions": [{"kind": "named", "name": name} for name in names],
            "inputs": inputs,
            "outputs": outputs,
        }
        return self.client.infer(model, list(tensors), parameters={"shm_io": written(descriptor), **parameters})

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


def in_hexadecimal(descriptor: Any) -> str:
    return json.dumps(descriptor).encode().hex()


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


def test_input_and_output_in_one_region(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW, 256)
    result = wire.send([region.name], {"X": [0, 256, 16, "FP32", [4]]}, {"Y": [0, 512, 16]})
    assert region.read(512) == [1, 2, 3, 4]
    assert wire.tensors_in(result) == []


def test_the_last_bytes_of_a_region_can_be_used(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    wire.send([region.name], X_AT_0, {"Y": [0, region.byte_size - 16, 16]})
    assert region.read(region.byte_size - 16) == [1, 2, 3, 4]


def test_bytes_around_an_output_stay(wire: Wire) -> None:
    region = wire.region()
    region.write(np.full(region.byte_size, 255, np.uint8))
    region.write(ROW)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    content = region.path.read_bytes()
    assert content[16:1024] == b"\xff" * 1008
    assert content[1040:] == b"\xff" * (region.byte_size - 1040)


def test_the_descriptor_may_be_in_hexadecimal(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    for _ in range(2):
        wire.send([region.name], X_AT_0, Y_BEHIND_IT, written=in_hexadecimal)
        assert region.read(1024) == [1, 2, 3, 4]
        region.write(np.zeros(4, np.float32), 1024)


def test_a_repeated_request_reads_what_is_there_now(wire: Wire) -> None:
    region = wire.region()
    for value in range(5):
        region.write(np.full(4, value, np.float32))
        wire.send([region.name], X_AT_0, Y_BEHIND_IT)
        assert region.read(1024) == [value] * 4


def test_a_model_with_a_batch_dimension(wire: Wire) -> None:
    images = np.random.default_rng(5).random((2, 3, 224, 224), np.float32)
    region = wire.region(byte_size=2 * images.nbytes)
    region.write(images)
    carrier = wire.module.InferInput("SHM", [2, 0], "UINT8")
    carrier.set_data_from_numpy(np.empty((2, 0), np.uint8))
    result = wire.send(
        [region.name],
        {"INPUT0": [0, 0, images.nbytes, "FP32", images.shape]},
        {"OUTPUT0": [0, images.nbytes, images.nbytes]},
        model="multiply",
        tensors=(carrier,),
    )
    assert region.read(images.nbytes, images.size) == (images * 2).ravel().tolist()
    assert wire.tensors_in(result) == []


def test_model_and_client_see_each_others_writes_while_the_request_runs(wire: Wire) -> None:
    region = wire.region()
    region.write(np.array([41, 0], np.int64))
    memory = region.handle._mpsm_handle.buf.cast("q")
    seen = []

    def converse() -> None:
        deadline = time.monotonic() + 10
        while memory[128] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(memory[128])
        memory[1] = 76

    conversation = threading.Thread(target=converse)
    conversation.start()
    wire.send([region.name], {"QUESTION": [0, 0, 16, "INT64", [2]]}, {"ANSWER": [0, 1024, 16]}, model="handshake")
    conversation.join()
    answer = [memory[128], memory[129]]
    memory.release()
    assert seen == [42]
    assert answer == [42, 77]


def test_an_output_that_is_larger_than_its_span_comes_back_through_triton(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    result = wire.send([region.name], X_AT_0, {"Y": [0, 1024, 16], "RUNS": [0, 2048, 8]}, model="repeat", times=2)
    assert wire.tensors_in(result) == ["Y"]
    assert result.as_numpy("Y").tolist() == [1, 2, 3, 4] * 2
    assert region.read(1024) == [0] * 4


def test_an_output_without_a_span_comes_back_through_triton(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    result = wire.send([region.name], X_AT_0, {})
    assert result.as_numpy("Y").tolist() == [1, 2, 3, 4]


def test_an_input_in_band_and_an_output_in_a_region(wire: Wire) -> None:
    region = wire.region()
    tensor = wire.module.InferInput("X", [4], "FP32")
    tensor.set_data_from_numpy(ROW)
    result = wire.send([region.name], {}, Y_BEHIND_IT, tensors=(tensor,))
    assert region.read(1024) == [1, 2, 3, 4]
    assert wire.tensors_in(result) == []


@tells_404
def test_a_name_that_is_not_registered_is_not_found(wire: Wire) -> None:
    region = wire.region(registered=False)
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "NOT_FOUND")
    assert "regions[0] is not registered at the server" in message


@tells_404
def test_a_name_that_was_unregistered_is_not_found_at_once(wire: Wire) -> None:
    first, second = wire.region(), wire.region()
    wire.send([first.name], X_AT_0, Y_BEHIND_IT)
    wire.client.unregister_system_shared_memory(first.name)
    before = first.path.read_bytes()
    message = wire.refused(lambda: wire.send([first.name], X_AT_0, Y_BEHIND_IT), "NOT_FOUND")
    assert "shm:gone: " in message
    assert first.path.read_bytes() == before
    wire.send([second.name], X_AT_0, Y_BEHIND_IT)


def test_a_name_that_stands_for_another_file_is_followed_at_once(wire: Wire) -> None:
    old, new = wire.region(), wire.region(registered=False)
    old.write(ROW)
    new.write(ROW * 10)
    names = itertools.cycle((new, old))
    for region, other in [(old, new), (new, old)] * 5:
        other.write(np.zeros(4, np.float32), 1024)
        before = other.path.read_bytes()
        wire.send([old.name], X_AT_0, Y_BEHIND_IT)
        assert region.read(1024) == region.read()
        assert other.path.read_bytes() == before
        wire.client.unregister_system_shared_memory(old.name)
        next(names).register(old.name)


def test_a_name_that_stands_for_another_part_of_its_file_is_followed_at_once(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    region.write(ROW * 10, PAGE)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    wire.client.unregister_system_shared_memory(region.name)
    region.register(offset=PAGE)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert region.read(1024) == [1, 2, 3, 4]
    assert region.read(PAGE + 1024) == [10, 20, 30, 40]


def test_a_sparse_region_gets_its_memory_before_it_is_used(wire: Wire) -> None:
    region = wire.region()
    assert region.path.stat().st_blocks == 0
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert region.path.stat().st_blocks * 512 == region.byte_size


def test_a_key_that_stands_for_another_file_is_followed(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    region.write(np.zeros(4, np.float32), 1024)
    wire.client.unregister_system_shared_memory(region.name)
    region.replace()
    region.path.write_bytes((ROW * 10).tobytes() + bytes(region.byte_size - 16))
    region.register()
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert np.frombuffer(region.path.read_bytes(), np.float32)[256:260].tolist() == [10, 20, 30, 40]
    assert region.read(1024) == [0] * 4  # the old file


def test_a_file_that_was_made_anew_is_followed_though_nobody_registered_it_anew(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    region.replace()
    region.path.write_bytes((ROW * 10).tobytes() + bytes(region.byte_size - 16))
    region.write(np.zeros(4, np.float32), 1024)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert np.frombuffer(region.path.read_bytes(), np.float32)[256:260].tolist() == [10, 20, 30, 40]
    assert region.read(1024) == [0] * 4


@tells_404
def test_a_file_that_was_removed_is_not_found(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    region.path.unlink()
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "NOT_FOUND")
    assert "regions[0] does not exist" in message


def test_a_file_that_was_truncated_is_refused(wire: Wire) -> None:
    region = wire.region()
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    os.truncate(region.path, 512)
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "INVALID_ARGUMENT")
    assert "shm_io.regions[0] refused" in message


def test_a_span_may_not_leave_what_is_registered(wire: Wire) -> None:
    region = wire.region()
    spans = {"Y": [0, region.byte_size - 8, 16]}
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, spans), "INVALID_ARGUMENT")
    assert f"outputs.Y: found 16 bytes at offset {region.byte_size - 8}, expected bytes from 0 to" in message


def test_spans_count_from_the_beginning_of_what_is_registered(wire: Wire) -> None:
    region = wire.region(registered=False)
    region.register(offset=PAGE)
    wire.names.append(region.name)
    region.write(ROW, PAGE)
    wire.send([region.name], X_AT_0, Y_BEHIND_IT)
    assert region.read(PAGE + 1024) == [1, 2, 3, 4]


def test_overlapping_spans_are_refused(wire: Wire) -> None:
    region = wire.region()
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, {"Y": [0, 8, 16]}), "INVALID_ARGUMENT")
    assert "outputs.Y" in message


def test_spans_that_overlap_under_two_names_are_refused(wire: Wire) -> None:
    region, twin = wire.region(), wire.region(registered=False)
    twin.path.unlink()
    os.link(region.path, twin.path)  # a second key: Triton 2.51 does not register one key under two names
    twin.register()
    wire.names.append(twin.name)
    region.write(ROW)
    names = [region.name, twin.name]
    before = region.path.read_bytes()
    message = wire.refused(lambda: wire.send(names, X_AT_0, {"Y": [1, 8, 16]}), "INVALID_ARGUMENT")
    assert "outputs.Y: found bytes of another tensor" in message
    assert region.path.read_bytes() == before
    wire.send(names, X_AT_0, {"Y": [1, 16, 16]})
    assert region.read(16) == [1, 2, 3, 4]


def test_a_name_that_is_given_twice_is_refused(wire: Wire) -> None:
    region = wire.region()
    message = wire.refused(lambda: wire.send([region.name, region.name], X_AT_0, Y_IN_THE_SECOND), "INVALID_ARGUMENT")
    assert "shm_io.regions[1]: found a region that is named before" in message


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


def test_a_symbolic_link_to_another_file_is_refused(wire: Wire, tmp_path: Path) -> None:
    region = wire.region()
    target = tmp_path / "target"
    target.write_bytes(bytes(region.byte_size))
    region.path.unlink()
    region.path.symlink_to(target)
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "INVALID_ARGUMENT")
    assert "it is a symbolic link" in message


def test_a_model_can_refuse_names(wire: Wire) -> None:
    region = wire.region()
    message = wire.refused(
        lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT, model="names_refused"), "INVALID_ARGUMENT"
    )
    assert "SHM_FOREIGN_REGIONS is off" in message


def test_a_model_can_refuse_this_users_regions(wire: Wire) -> None:
    region = wire.region()
    message = wire.refused(
        lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT, model="strangers_only"), "INVALID_ARGUMENT"
    )
    assert f"it belongs to user {os.geteuid()}, whom the model's SHM_ALLOWED_UIDS does not allow" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_model_can_allow_another_user(wire: Wire) -> None:
    region = wire.region()
    region.write(ROW)
    os.chown(region.path, NOBODY, -1)
    message = wire.refused(lambda: wire.send([region.name], X_AT_0, Y_BEHIND_IT), "INVALID_ARGUMENT")
    assert f"it belongs to user {NOBODY}" in message
    wire.send([region.name], X_AT_0, Y_BEHIND_IT, model="strangers_only")
    assert region.read(1024) == [1, 2, 3, 4]
