"""Model and client work in the same memory of a GPU: shown by addresses, and by writes that the other one sees."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.server import EmbeddedServer

from .fake_gpus import MODEL, Gpu, flavour_of, gpu_of
from .flavours import Flavour

X = np.arange(1000, dtype=np.float32)
ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


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
        question = call.inputs["X"].peek()
        question[:] = [1, 1]
        result = call.infer()
        answer = result["Y"].peek()
        question[:] = answer[:] = 0
        has_ended = threading.Event()
        seen = []

        def converse() -> None:
            while answer[0] == 0 and not has_ended.wait(0.001):
                pass
            seen.append(int(answer[0]))
            question[1] = 76

        conversation = threading.Thread(target=converse)
        conversation.start()
        call.infer().release()
        has_ended.set()
        conversation.join()
        assert seen == [42]  # the model's write reached the client before the response did
        assert answer[1] == 77  # the client's write reached the model after the request did


def test_an_output_lies_in_the_allocation_that_the_model_was_given(gpu: Gpu) -> None:
    with prepared(gpu, "double") as call, call.infer() as result:
        x, y = call.inputs["X"], result["Y"]
        begin, byte_size = gpu.cuda.extent(x.address)
        assert gpu.cuda.extent(y.address) == (begin, byte_size)
        assert begin <= x.address < x.address + x.nbytes <= y.address < y.address + y.nbytes <= begin + byte_size
        assert gpu.times("allocate") == 1


def test_an_input_that_the_model_passes_through_is_where_the_client_wrote_it(gpu: Gpu) -> None:
    with prepared(gpu, "pass_through") as call, call.infer() as result:
        assert result["Y"].address == call.inputs["X"].address


def test_a_part_of_an_input_that_is_passed_through_is_there_too(gpu: Gpu) -> None:
    with prepared(gpu, "pass_a_part_through") as call:
        call.inputs["X"][:] = X
        with call.infer() as result:
            assert result["Y"].address == call.inputs["X"].address + 4
            assert result["Y"].peek().tolist() == X[1:-1].tolist()


def test_the_next_answer_of_a_prepared_call_appears_in_the_arrays_of_the_last(gpu: Gpu) -> None:
    with prepared(gpu, "double") as call:
        call.inputs["X"].fill(3)
        first = call.infer()["Y"]
        assert (first.peek() == 6).all()
        call.inputs["X"].fill(5)
        call.infer().release()
        assert (first.peek() == 10).all()


def test_a_prepared_call_copies_nothing(gpu: Gpu) -> None:
    with prepared(gpu, "double") as call:
        call.infer().release()
        call.infer().release()
    assert gpu.times("copy") == 0


def test_an_array_of_the_user_is_copied_once_and_on_the_gpu(gpu: Gpu) -> None:
    x = gpu.array(X)
    with gpu.infer("double", x, ON_THE_GPU):
        copies = [what for name, what in gpu.cuda.log if name == "copy"]
        assert [(direction, byte_size) for direction, byte_size, _ in copies] == [("device to device", X.nbytes)]


def test_the_wire_carries_no_tensors(gpu: Gpu) -> None:
    before = gpu.client.stats().bytes_avoided
    gpu.infer("double", gpu.array(X), ON_THE_GPU).release()
    assert gpu.client.stats().bytes_avoided - before == 2 * X.nbytes


def test_memory_is_allocated_and_mapped_once_for_many_calls(every_gpu: Gpu) -> None:
    before = every_gpu.told().opens
    for value in range(20):
        with every_gpu.infer("double", every_gpu.array(np.full(X.size, value)), ON_THE_GPU) as result:
            assert (result["Y"].peek() == 2 * value).all()  # type: ignore[attr-defined]  # an array of the fake GPU
    assert every_gpu.times("allocate") == 1
    assert every_gpu.told().opens == before + 1


def test_calls_of_similar_sizes_share_memory(gpu: Gpu) -> None:
    before = gpu.told().opens
    for size in range(900, 1000, 10):
        gpu.infer("double", gpu.array(X[:size]), ((size,), X.dtype, "cuda:0")).release()
    assert gpu.told().opens == before + 1
