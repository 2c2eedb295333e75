"""What a model's process keeps of its clients' memory: as long as it is needed, and no longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.processes import children
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


def paths_of_regions() -> list[Path]:
    return list(SHM.glob(f"shmbu-{os.getpid()}-*"))
