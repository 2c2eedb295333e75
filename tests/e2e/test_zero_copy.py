"""Both processes work in the same memory: shown by addresses, and by writes that the other one sees."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shm_backend_utils.client.options import PathName

from .flavours import AnyClient
from .mapped import lies_in_shared_memory

pytestmark = pytest.mark.every_region

IMAGES = np.ones((1, 3, 224, 224), np.float32)


def test_model_and_client_see_each_others_writes_while_the_request_runs(any_client: AnyClient) -> None:
    with any_client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as call:
        question = call.inputs["QUESTION"]
        question[:] = [1, 1]
        answer = call.infer()["ANSWER"]  # a view: the next answer will appear here
        question[:] = [41, 0]
        answer[:] = 0
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


def test_an_input_that_the_model_passes_through_is_where_the_client_wrote_it(any_client: AnyClient) -> None:
    with any_client.prepare("identity", {"INPUT0": ((1000,), np.float32)}) as call, call.infer() as result:
        assert result["OUTPUT0"].ctypes.data == call.inputs["INPUT0"].ctypes.data


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_inputs_and_outputs_lie_in_shared_memory(any_client: AnyClient, path: PathName) -> None:
    with any_client.prepare("multiply", {"INPUT0": (IMAGES.shape, np.float32)}, path=path) as call:
        assert lies_in_shared_memory(call.inputs["INPUT0"])
        with call.infer() as result:
            assert lies_in_shared_memory(result["OUTPUT0"])


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_outputs_of_infer_lie_in_shared_memory(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("multiply", {"INPUT0": IMAGES}, path=path) as result:
        assert lies_in_shared_memory(result["OUTPUT0"])


def test_inline_there_is_no_shared_memory(any_client: AnyClient) -> None:
    with any_client.prepare("multiply", {"INPUT0": (IMAGES.shape, np.float32)}, path="inline") as call:
        call.inputs["INPUT0"][:] = 1
        with call.infer() as result:
            assert not lies_in_shared_memory(result["OUTPUT0"])
    assert any_client.stats().pool_bytes == 0


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_the_next_answer_of_a_prepared_call_appears_in_the_arrays_of_the_last(
    any_client: AnyClient, path: PathName
) -> None:
    with any_client.prepare("multiply", {"INPUT0": (IMAGES.shape, np.float32)}, path=path) as call:
        call.inputs["INPUT0"][:] = 3
        first = call.infer()["OUTPUT0"]
        assert (first == 6).all()
        call.inputs["INPUT0"][:] = 5
        call.infer().release()
        assert (first == 10).all()


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_the_wire_carries_no_tensors(any_client: AnyClient, path: PathName) -> None:
    before = any_client.stats().bytes_avoided
    any_client.infer("multiply", {"INPUT0": IMAGES}, path=path).release()
    assert any_client.stats().bytes_avoided - before == 2 * IMAGES.nbytes
