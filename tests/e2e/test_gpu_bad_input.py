"""What is wrong with memory of GPUs is refused with one clear error, tells no secret, and harms no later call."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import InferenceError, Result
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import whole_blocks
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.server import EmbeddedServer

from .eventually import eventually
from .fake_gpus import (
    HAND_MADE_SIZE,
    MODEL,
    Gpu,
    GpuRequest,
    X,
    claim_of,
    content_of,
    flavour_of,
    gpu_of,
    hand_made_for,
    told_by,
)

ALLOCATED = whole_blocks(HAND_MADE_SIZE)
ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[GpuRequest]:
    with hand_made_for(triton_server) as made:
        yield made


def refused(made: GpuRequest) -> tuple[str, str]:
    """Return the code and the message of a refusal, which tells no secret and leaves nothing behind."""
    address = made.request.address
    known = [address.key, address.token]
    for claim in made.table.regions:
        known += [claim.name.hex(), base64.b64encode(claim.name).decode()]
    with pytest.raises(InferenceServerException) as refusal:
        made.send()
    message = refusal.value.message()
    assert not [secret for secret in known if secret in message]
    told_by(MODEL, made.url, "sweep")  # the model would do it by itself, within seconds
    assert not has_users(made.region.segment.fileno())
    return refusal.value.status(), message


def _claim(**fields: Any) -> Callable[[GpuRequest], None]:
    def change(made: GpuRequest) -> None:
        for field, value in fields.items():
            setattr(made.claim, field, value)

    return change


def _freed_memory(made: GpuRequest) -> None:
    freed = CudaAllocation(made.cuda, HAND_MADE_SIZE, 0)
    made.table.regions = [claim_of(freed)]
    freed.free()
    eventually(lambda: not made.cuda.retired.collect())


LIES = {
    "freed memory": (_freed_memory, "its owner has freed the memory"),
    "size beyond the allocation": (
        _claim(byte_size=ALLOCATED + 1),
        f"regions[1] refused: it claims {ALLOCATED + 1} bytes of an allocation of {ALLOCATED}",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_table_is_refused_and_an_honest_one_served(hand_made: GpuRequest, lie: str) -> None:
    honest = copy.deepcopy(hand_made.table)
    change, complaint = LIES[lie]
    change(hand_made)
    before = hand_made.content().copy()
    code, message = refused(hand_made)
    assert code == "StatusCode.INVALID_ARGUMENT"
    assert complaint in message
    np.testing.assert_array_equal(hand_made.content(), before)
    hand_made.table = hand_made.request.table = honest
    hand_made.send()
    assert hand_made.is_doubled


# What a client notices, or its model on its behalf


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


def content(array: Any) -> list[float]:
    values: list[float] = content_of(array).tolist()
    return values


def doubles_on_the_gpu(gpu: Gpu) -> bool:
    with gpu.infer("double", gpu.array(X), ON_THE_GPU, path="direct") as result:
        return bool(content(result["Y"]) == (X * 2).tolist())


def test_a_client_whose_memory_cannot_be_opened_at_all_takes_another_path(gpu: Gpu) -> None:
    gpu.told("fail_next", function="cuIpcOpenMemHandle", name="CUDA_ERROR_MAP_FAILED", times=2)
    with gpu.infer("double_where_it_is_wanted", gpu.array(X), ON_THE_GPU) as result:
        assert (result.path, content(result["Y"])) == ("triton-shm", (X * 2).tolist())
    gpu.client.explain(MODEL)  # checks everything anew
    assert doubles_on_the_gpu(gpu)


# Where CUDA is missing


MISSING = {
    "bindings": "GPU memory needs NVIDIA's cuda-bindings, which cannot be imported",
    "GPU": "CUDA_ERROR_NO_DEVICE: no GPU is visible here; see nvidia-smi",
}


@pytest.mark.parametrize("where", ["cuda:0", None])
@pytest.mark.parametrize("lacks", MISSING)
def test_a_model_that_can_use_no_gpu_says_why_and_serves_the_host(gpu: Gpu, lacks: str, where: str | None) -> None:
    def infer(x: Any, where: str | None) -> Result:
        return gpu.client.infer("fake_gpu_missing", {"X": x}, outputs={"Y": where}, parameters={"lacks": lacks})

    infer(X, None).release()
    refusal = refusal_of(lambda: infer(gpu.array(X), where))
    assert refusal.startswith("[StatusCode.UNAVAILABLE] ")
    assert MISSING[lacks] in refusal
    with infer(X, None) as result:
        assert (result.path, result["Y"].tolist()) == ("direct", (X * 2).tolist())


def refusal_of(call: Callable[[], object]) -> str:
    """Return what a model says against a call. Nothing is kept of the error, which has the call's arrays."""
    with pytest.raises(InferenceError) as refusal:
        call()
    return str(refusal.value)
