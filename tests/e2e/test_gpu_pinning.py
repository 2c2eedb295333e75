"""Regions on the host that a model registers with CUDA, so that copies to a GPU need no staging buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.tensors.attributes import MemoryType

from .fake_gpus import MODEL, Gpu, X, flavour_of, gpu_of, told_by

PINNED = "fake_gpu_pinned"


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server), PINNED) as gpu:
        yield gpu


def answer(gpu: Gpu, deed: str, x: Any = X, count: int = 4) -> list[int]:
    with gpu.infer(deed, x, 4 * count, path="direct") as result:
        return [int(number) for number in result["Y"]]


@pytest.mark.parametrize(("model", "kind"), [(PINNED, MemoryType.CPU_PINNED), (MODEL, MemoryType.CPU)])
def test_views_say_whether_their_memory_is_pinned(triton_server: EmbeddedServer, model: str, kind: MemoryType) -> None:
    with gpu_of(flavour_of(triton_server), model) as gpu:
        assert answer(gpu, "tell_attributes") == [kind, 0, X.nbytes, False]


def test_a_region_is_unpinned_when_it_is_unmapped(gpu: Gpu) -> None:
    before = gpu.told("sweep").pinned_now  # of earlier tests, something may be left
    answer(gpu, "tell_attributes")
    assert gpu.told("sweep").pinned_now == before + 1
    gpu.client.close()
    assert gpu.told("sweep").pinned_now == before


def test_what_cannot_be_pinned_is_served_all_the_same_with_one_warning(triton_server: EmbeddedServer) -> None:
    url = triton_server.grpc_url
    before = told_by(PINNED, url, "fail_next", function="cuMemHostRegister", name="CUDA_ERROR_OUT_OF_MEMORY", times=2)
    for _ in range(2):
        with ShmClient(url, pool=PoolOptions(region="system")) as client:  # which opens nothing else before
            parameters = {"deed": "tell_attributes"}
            with client.infer(PINNED, {"X": X}, outputs={"Y": 16}, parameters=parameters, path="direct") as result:
                assert result["Y"][0] == MemoryType.CPU
    after = told_by(PINNED, url, "sweep")
    assert (after.pins, after.pinned_now) == (before.pins + 2, before.pinned_now)
    log = triton_server.log_file.read_text(errors="replace")
    assert log.count("SHM_PIN_HOST_MEMORY: memory stays pageable: pinning ") == 1
    assert "failed with CUDA_ERROR_OUT_OF_MEMORY" in log
