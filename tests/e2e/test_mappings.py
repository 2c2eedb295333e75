"""What a model's process keeps of its clients' memory: as long as it is needed, and no longer."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from scripts.tools.processes import children, mappings
from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

from ..crash.processes import eventually, held_regions, regions_of, stub_of

SHM = Path("/dev/shm")
X = {"X": np.zeros(4, np.float32)}


def stub(server: EmbeddedServer, model: str) -> int:
    pid = stub_of(server, model)
    assert pid is not None
    return pid


@pytest.fixture
def shm_client(triton_server: EmbeddedServer, region: RegionName) -> Iterator[ShmClient]:
    with ShmClient(triton_server.grpc_url, timeout_s=30, pool=PoolOptions(region=region)) as client:
        yield client


@pytest.mark.every_region
def test_a_region_is_mapped_once_however_often_it_is_used(triton_server: EmbeddedServer, shm_client: ShmClient) -> None:
    pid, before = stub(triton_server, "direct_only"), regions_of(os.getpid())
    with shm_client.prepare("direct_only", {"X": ((4,), np.float32)}, outputs={"Y": 16}) as call:
        call.infer().release()
        regions = regions_of(os.getpid()) - before
        held = held_regions(pid, regions)
        for _ in range(10):
            call.infer().release()
        assert len(regions) == 1
        assert set(held) == set(regions)
        assert held_regions(pid, regions) == held


@pytest.mark.every_region
def test_a_model_lets_go_of_what_its_client_closed_and_keeps_what_a_living_one_may_use_again(
    triton_server: EmbeddedServer, shm_client: ShmClient, region: RegionName
) -> None:
    earlier = regions_of(os.getpid())
    shm_client.infer("direct_only", X, outputs={"Y": 16}).release()
    kept = regions_of(os.getpid()) - earlier
    with ShmClient(triton_server.grpc_url, pool=PoolOptions(region=region)) as other:
        other.infer("direct_only", X, outputs={"Y": 16}).release()
        closed = regions_of(os.getpid()) - kept - earlier
    pid = stub(triton_server, "direct_only")
    before = held_regions(pid, kept)
    assert before
    eventually(lambda: not held_regions(pid, closed))
    assert held_regions(pid, kept) == before


def test_a_model_lets_go_of_a_region_that_was_unregistered(triton_server: EmbeddedServer) -> None:
    path = SHM / f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    path.write_bytes(bytes(4096))
    grpc = tritonclient.grpc.InferenceServerClient(triton_server.grpc_url)
    try:
        grpc.register_system_shared_memory("to be forgotten", path.name, 4096)
        send_named(grpc, "direct_only", ["to be forgotten"])
        pid = stub(triton_server, "direct_only")
        assert mapped_bytes(pid, [path.name])
        grpc.unregister_system_shared_memory("to be forgotten")
        eventually(lambda: not mapped_bytes(pid, [path.name]))
    finally:
        path.unlink()
        grpc.close()


@pytest.mark.parametrize("region", ["system"])  # sealed ones cannot be
def test_a_region_that_was_truncated_is_refused_and_the_model_lives_on(
    triton_server: EmbeddedServer, shm_client: ShmClient
) -> None:
    before = children(triton_server.pid)
    x = np.ones(4096, np.float32)
    with shm_client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.infer()
        (path,) = paths_of_regions()
        os.truncate(path, 8192)  # the header and the record, which the client itself needs, stay
        with pytest.raises(InferenceError, match="shm:refused: .* its \\d+ bytes are not there any more"):
            call.infer()
    eventually(lambda: not path.exists())  # the client does not use it again
    assert children(triton_server.pid) == before


def send_named(grpc: tritonclient.grpc.InferenceServerClient, model: str, names: list[str]) -> None:
    """Send a request with an input at the beginning of the first region and an output in the last one."""
    descriptor = {
        "v": 1,
        "model": model,
        "regions": [{"kind": "named", "name": name} for name in names],
        "inputs": {"X": [0, 0, 16, "FP32", [4]]},
        "outputs": {"Y": [len(names) - 1, 1024, 16]},
    }
    grpc.infer(model, [], parameters={"shm_io": json.dumps(descriptor)}, client_timeout=30)


def paths_of_regions() -> list[Path]:
    return list(SHM.glob(f"shmbu-{os.getpid()}-*"))


def mapped_bytes(pid: int, names: list[str]) -> int:
    """Return how much of these objects a process has mapped."""
    total = 0
    for line in mappings(pid):
        fields = line.split(maxsplit=5)
        if any(fields[-1].startswith(f"{SHM}/{name}") for name in names):
            begin, _, end = fields[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total
