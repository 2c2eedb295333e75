"""What a client or its model cannot do with a GPU ends in another path or a clear error, and harms no later call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shm_backend_utils.client import InferenceError, Result
from shm_backend_utils.server import EmbeddedServer

from .fake_gpus import MODEL, Gpu, X, content_of, flavour_of, gpu_of

ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


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
