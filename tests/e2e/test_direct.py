"""The direct path: tensors that stay where the client put them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer

from .in_band import NUMBERS


def test_model_and_client_see_each_others_writes_while_the_request_runs(client: ShmClient) -> None:
    with client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as call:
        question = call.inputs["QUESTION"]
        question[:] = [1, 1]
        answer = call.infer()["ANSWER"]  # a view: the next answer will appear here
        question[:] = [41, 0]
        answer[:] = 0
        seen = []

        def converse() -> None:
            deadline = time.monotonic() + 10
            while answer[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(int(answer[0]))
            question[1] = 76

        conversation = threading.Thread(target=converse)
        conversation.start()
        call.infer().release()
        conversation.join()
    assert seen == [42]  # the model's write reached the client before the response did
    assert answer[1] == 77  # the client's write reached the model after the request did


def test_an_output_is_a_view_of_the_slot_and_not_a_copy(client: ShmClient) -> None:
    with client.prepare("multiply", {"INPUT0": ((2, 3, 224, 224), np.float32)}) as call:
        call.inputs["INPUT0"][:] = 3
        first = call.infer()["OUTPUT0"]
        assert (first == 6).all()
        call.inputs["INPUT0"][:] = 5
        call.infer()
        assert (first == 10).all()


def test_an_input_that_the_model_passes_through_is_not_copied(client: ShmClient) -> None:
    with client.prepare("identity", {"INPUT0": ((1000,), np.float32)}) as call:
        source = call.inputs["INPUT0"]
        source[:] = np.arange(1000)
        with call.infer() as result:
            assert result["OUTPUT0"].ctypes.data == source.ctypes.data
            assert result["OUTPUT0"].shape == (1000,)
        del source


@pytest.mark.parametrize("dtype", NUMBERS.values(), ids=lambda dtype: dtype.name)
def test_every_dtype(client: ShmClient, dtype: dtypes.DType) -> None:
    values = np.arange(1, 6).astype(dtype.numpy)
    name = f"OUT_{dtype.name}"
    with client.infer("every_dtype", {f"IN_{dtype.name}": values}, outputs={name: values.nbytes}) as result:
        assert not result.overflowed
        assert result[name].dtype == dtype.numpy
        np.testing.assert_array_equal(result[name], values[::-1])


def test_several_dtypes_in_one_request(client: ShmClient) -> None:
    inputs = {f"IN_{name}": np.arange(7).astype(dtype.numpy) for name, dtype in NUMBERS.items()}
    hints = {f"OUT_{name}": ((7,), dtype.numpy) for name, dtype in NUMBERS.items()}
    with client.infer("every_dtype", inputs, outputs=hints) as result:
        for name in NUMBERS:
            np.testing.assert_array_equal(result[f"OUT_{name}"], inputs[f"IN_{name}"][::-1])


def test_an_empty_tensor(client: ShmClient) -> None:
    with client.infer("identity", {"INPUT0": np.empty(0, np.float32)}) as result:
        assert result["OUTPUT0"].shape == (0,)


def test_inputs_in_any_memory_order_are_written_correctly(client: ShmClient) -> None:
    image = np.asfortranarray(np.random.default_rng(7).random((2, 3, 224, 224), np.float32))
    with client.infer("multiply", {"INPUT0": image[:, ::-1]}) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], image[:, ::-1] * 2)


def test_requests_follow_each_other_in_one_slot(client: ShmClient) -> None:
    for value in range(20):
        with client.infer("multiply", {"INPUT0": np.full((1, 3, 224, 224), value, np.float32)}) as result:
            assert (result["OUTPUT0"] == 2 * value).all()


def test_a_view_outlives_result_call_and_client(url: str) -> None:
    with ShmClient(url) as client:
        array = client.infer("multiply", {"INPUT0": np.ones((1, 3, 224, 224), np.float32)})["OUTPUT0"]
        client.infer("multiply", {"INPUT0": np.zeros((1, 3, 224, 224), np.float32)}).release()
    assert (array == 2).all()


def test_only_the_requested_outputs_come_back(client: ShmClient) -> None:
    with client.infer("repeat", {"X": np.ones(3, np.float32)}, outputs=["Y"], parameters={"times": 2}) as result:
        assert list(result) == ["Y"]


def test_an_output_that_finds_no_room_comes_back_through_triton_and_the_model_runs_once(client: ShmClient) -> None:
    x = np.arange(5, dtype=np.float32)
    wanted = {"Y": 4, "RUNS": 8}
    with client.infer("repeat", {"X": x}, outputs=wanted, parameters={"times": 3}, path="direct") as result:
        assert result.overflowed == {"Y": 60}
        np.testing.assert_array_equal(result["Y"], np.tile(x, 3))
        runs = int(result["RUNS"][0])
    wanted = {"Y": 60, "RUNS": 8}
    with client.infer("repeat", {"X": x}, outputs=wanted, parameters={"times": 3}, path="direct") as result:
        assert not result.overflowed
        assert int(result["RUNS"][0]) == runs + 1


def test_the_room_for_an_output_of_open_size_is_learned(client: ShmClient) -> None:
    x = np.arange(5, dtype=np.float32)
    with client.infer("repeat", {"X": x}, outputs=["Y"], parameters={"times": 3}) as first:
        assert first.overflowed
    with client.infer("repeat", {"X": x}, outputs=["Y"], parameters={"times": 3}) as second:
        assert not second.overflowed
        np.testing.assert_array_equal(second["Y"], np.tile(x, 3))


def test_the_users_parameters_reach_the_model_without_the_descriptor(client: ShmClient) -> None:
    with client.infer("repeat", {"X": np.ones(1, np.float32)}, parameters={"times": 4}) as result:
        assert result["Y"].shape == (4,)


def test_four_threads_share_one_client(client: ShmClient) -> None:
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            x = rng.random((int(rng.integers(1, 5)), 3, 224, 224), np.float32)
            with client.infer("multiply", {"INPUT0": x}) as result:
                if not np.array_equal(result["OUTPUT0"], x * 2):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_requests_of_several_clients_meet_in_one_batch(url: str) -> None:
    count = 4
    together = threading.Barrier(count)
    seen: list[int] = []

    def work(row: int) -> None:
        with ShmClient(url) as client:
            x = np.full((1, 4), row, np.float32)
            client.infer("batch_witness", {"X": x}).release()  # everything is warm when it matters
            together.wait(timeout=30)
            with client.infer("batch_witness", {"X": x}) as result:
                assert (result["Y"] == row + 1).all()
                seen.append(int(result["REQUEST_COUNT"][0, 0]))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == count
    assert max(seen) > 1


def test_a_one_gibibyte_request_takes_no_memory_beyond_the_clients(
    client: ShmClient, triton_server: EmbeddedServer
) -> None:
    with client.prepare("identity", {"INPUT0": ((2**28,), np.float32)}) as call:
        call.inputs["INPUT0"][-1] = 7
        before = _pool_bytes(triton_server)
        with call.infer() as result:
            assert result["OUTPUT0"].nbytes == 2**30
            assert result["OUTPUT0"][-1] == 7
        assert _pool_bytes(triton_server) == before


def _pool_bytes(server: EmbeddedServer) -> int:
    return sum(pool.stat().st_size for pool in Path("/dev/shm").glob(f"{server.shm_prefix}*"))
