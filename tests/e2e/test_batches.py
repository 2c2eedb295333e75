"""Several requests as one batch: whose rows are whose, what is copied, and who fails when something is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

from shm_backend_utils.client import PreparedCall, Result, ShmClient
from shm_backend_utils.server import EmbeddedServer

from .hand_made import hand_made

EIGHT = 8
"""So many rows make a batch at once; for fewer, the server waits some time."""
WIDTH = 4
OUTPUTS = {"Y": 4 * WIDTH, "FACTS": None}
SIZE, ROW, COPIED, IN_PLACE = range(4)
"""What FACTS tells of each row."""


def row(value: float) -> npt.NDArray[np.float32]:
    return np.full((1, WIDTH), value, np.float32)


@contextlib.contextmanager
def prepared(client: ShmClient, count: int, outputs: Any = None) -> Iterator[list[Any]]:
    """Prepare calls, with values that tell them apart: the first row is 1, the next 2, and so on."""
    with contextlib.ExitStack() as stack:
        calls = []
        for index in range(count):
            call = client.prepare("batch_rows", {"X": ((1, WIDTH), np.float32)}, outputs=outputs or OUTPUTS)
            calls.append(stack.enter_context(call))
            call.inputs["X"][:] = 1 + index
        yield calls


def all_at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do everything side by side, and return what came of it."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(work) for work in works]]


def answers(calls: Sequence[PreparedCall]) -> list[Result]:
    return all_at_once([call.infer for call in calls])


def facts(results: Sequence[Result]) -> npt.NDArray[np.int64]:
    return np.concatenate([result["FACTS"] for result in results])


def are_right(results: Sequence[Result]) -> bool:
    values = np.concatenate([result["Y"] for result in results])
    return bool((values == 2 * (1 + np.arange(len(values)))[:, np.newaxis]).all())


def test_rows_of_one_client_follow_one_another_and_not_a_byte_is_copied(client: ShmClient) -> None:
    with prepared(client, EIGHT) as calls:
        for _ in range(2):  # the second time, what was worked out the first time is used again
            results = answers(calls)
            assert are_right(results)
            assert facts(results).tolist() == [[EIGHT, index, 0, 1] for index in range(EIGHT)]


def test_rows_of_several_clients_are_copied_once_and_each_gets_its_own(triton_server: EmbeddedServer) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ShmClient(triton_server.grpc_url, timeout_s=30)) for _ in range(EIGHT)]
        (calls,) = zip(*[stack.enter_context(prepared(client, 1)) for client in clients], strict=True)
        for index, call in enumerate(calls):
            call.inputs["X"][:] = 1 + index
        results = answers(calls)
        assert are_right(results)
        told = facts(results)
        assert told[:, SIZE].tolist() == [EIGHT] * EIGHT
        assert sorted(told[:, ROW]) == list(range(EIGHT))
        assert told[:, COPIED].tolist() == [EIGHT * 4 * WIDTH] * EIGHT
        assert told[:, IN_PLACE].tolist() == [0] * EIGHT


def test_rows_that_come_in_different_ways_make_one_batch(triton_server: EmbeddedServer) -> None:
    """Triton puts requests together that carry the same tensors, whatever these mean: here each carries both."""
    url = triton_server.grpc_url
    in_memory, in_band, plain = range(0, 3), range(3, 6), range(6, EIGHT)
    outputs = {"Y": 4 * WIDTH, "FACTS": 32}
    with contextlib.ExitStack() as stack:
        grpc: Any = stack.enter_context(contextlib.closing(tritonclient.grpc.InferenceServerClient(url)))
        requests = [
            *[stack.enter_context(hand_made(url, "batch_rows", {"X": row(1 + index)}, outputs)) for index in in_memory],
            *[stack.enter_context(hand_made(url, "batch_rows", {}, outputs)) for _ in in_band],
        ]
        works: list[Callable[[], Any]] = [
            *[lambda index=index: requests[index].infer([in_band_row(99), carrier(1)]) for index in in_memory],
            *[lambda index=index: requests[index].infer([in_band_row(1 + index), carrier(1)]) for index in in_band],
            *[lambda index=index: grpc.infer("batch_rows", [in_band_row(1 + index), carrier(1)]) for index in plain],
        ]
        responses = all_at_once(works)
        values = [request.output("Y").ravel() for request in requests]
        values += [responses[index].as_numpy("Y").ravel() for index in plain]
        assert [value.tolist() for value in values] == [[2 * (1 + index)] * WIDTH for index in range(EIGHT)]
        told = [request.output("FACTS").ravel() for request in requests]
        told += [responses[index].as_numpy("FACTS").ravel() for index in plain]
        assert [fact[SIZE] for fact in told] == [EIGHT] * EIGHT
        assert sorted(fact[ROW] for fact in told) == list(range(EIGHT))


def in_band_row(value: float) -> Any:
    found = tritonclient.grpc.InferInput("X", [1, WIDTH], "FP32")
    found.set_data_from_numpy(row(value))
    return found


def carrier(batch_size: int) -> Any:
    found = tritonclient.grpc.InferInput("SHM", [batch_size, 0], "UINT8")
    found.set_data_from_numpy(np.empty((batch_size, 0), np.uint8))
    return found
