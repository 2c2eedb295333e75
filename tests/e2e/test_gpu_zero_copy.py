"""Model and client work in the same memory of a GPU: shown by addresses, and by writes that the other one sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.server import EmbeddedServer

from .conversation import conversed
from .fake_gpus import DRIVER, MODEL, Gpu, content_of, flavour_of, gpu_of
from .flavours import Flavour

X = np.arange(1000, dtype=np.float32)


@pytest.fixture
def every_gpu(flavour: Flavour) -> Iterator[Gpu]:
    """Each of the four clients."""
    with gpu_of(flavour) as gpu:
        yield gpu


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


def prepared(gpu: Gpu, deed: str, length: int = X.size) -> Any:
    place = ((length,), X.dtype, "cuda:0")
    return gpu.client.prepare(MODEL, {"X": place}, outputs={"Y": place}, parameters={"deed": deed})


def test_model_and_client_see_each_others_writes_while_the_request_runs(every_gpu: Gpu) -> None:
    with prepared(every_gpu, "answer_while_it_runs", 2) as call:
        question = DRIVER.memory(call.inputs["X"].address, (2,), X.dtype)
        question[:] = [1, 1]
        result = call.infer()
        answer = DRIVER.memory(result["Y"].address, (2,), X.dtype)
        question[:] = answer[:] = 0
        seen = conversed(question, answer, lambda: call.infer().release())
        assert seen == [42]  # the model's write reached the client before the response did
        assert answer[1] == 77  # the client's write reached the model after the request did


def test_an_output_lies_in_the_allocation_that_the_model_was_given(gpu: Gpu) -> None:
    with prepared(gpu, "double") as call, call.infer() as result:
        x, y = call.inputs["X"], result["Y"]
        begin, byte_size = gpu.cuda.extent(x.address, 0)
        assert gpu.cuda.extent(y.address, 0) == (begin, byte_size)
        assert begin <= x.address < x.address + x.nbytes <= y.address < y.address + y.nbytes <= begin + byte_size
        assert gpu.allocations == 1


def test_a_part_of_an_input_that_is_passed_through_is_there_too(gpu: Gpu) -> None:
    with prepared(gpu, "pass_a_part_through") as call:
        gpu.fill(call.inputs["X"], X)
        with call.infer() as result:
            assert result["Y"].address == call.inputs["X"].address + 4
            assert content_of(result["Y"]).tolist() == X[1:-1].tolist()
    assert gpu.times("cuMemcpyAsync") == 0


@pytest.mark.parametrize("lend_bytes", [0, 1 << 20])
def test_a_tensor_of_the_user_is_used_where_it_is(triton_server: EmbeddedServer, lend_bytes: int) -> None:
    """From a size on, which is 1 MiB by default; smaller ones are copied on the GPU."""
    large = np.arange(1 << 19, dtype=np.float32)
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(lend_bytes=lend_bytes)) as gpu:
        before = gpu.told()
        for number in range(3):
            x = gpu.array(large + number)
            with gpu.infer("double", x, (large.shape, large.dtype, "cuda:0"), path="direct") as result:
                np.testing.assert_array_equal(content_of(result["Y"]), (large + number) * 2)
            del x
        assert gpu.times("cuMemcpyAsync") == 0
        after = gpu.told()
        assert after.opens == before.opens + 4
        assert after.open_now == before.open_now + 1  # what is lent is unmapped before the answer


def test_calls_of_similar_sizes_share_memory_that_is_allocated_and_mapped_once(gpu: Gpu) -> None:
    before = gpu.told().opens
    for size in range(900, 1000, 5):
        with gpu.infer("double", gpu.array(X[:size]), ((size,), X.dtype, "cuda:0")) as result:
            np.testing.assert_array_equal(content_of(result["Y"]), X[:size] * 2)
    assert gpu.allocations == 1
    assert gpu.told().opens == before + 1
