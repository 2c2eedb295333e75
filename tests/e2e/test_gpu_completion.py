"""A response leaves when the GPU has finished, which is waited for once; or the client waits for it by an event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, Result
from shm_backend_utils.client.errors import deadline_exceeded
from shm_backend_utils.protocol import results
from shm_backend_utils.server import EmbeddedServer
from tests.crash.gate import Gate

from .fake_gpus import DRIVER, Gpu, X, ask, content_of, flavour_of, gpu_of, told_by

MOST_ROWS = 4
"""What the model `fake_gpu_batch` takes at once. It waits until it has as many."""

EVENTS = "fake_gpu_events"
ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
Y_OFFSET = 4096


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


def infer(gpu: Gpu, deed: str = "double", x: Any = X, where: Any = ON_THE_GPU, **options: Any) -> Result:
    return gpu.infer(deed, gpu.kept_array(x), where, path="direct", **options)


def prepared(gpu: Gpu, deed: str, **more: str) -> Any:
    parameters = {"deed": deed, **more}
    return gpu.client.prepare(
        gpu.model, {"X": ON_THE_GPU}, outputs={"Y": ON_THE_GPU}, path="direct", parameters=parameters
    )


def content(array: Any) -> list[float]:
    """Return what is in an array now, without waiting for anything."""
    values: list[float] = content_of(array).tolist()
    return values


def content_in_order(gpu: Gpu, array: Any) -> list[float]:
    """Return what is in an array when the user's stream, which the call was given, has come there."""
    gpu.cuda.synchronize_stream(gpu.streams[0], 0)
    return content(array)


def waits_of(gpu: Gpu, call: Callable[[], object]) -> int:
    """Return how often the model waits for its GPUs in a call."""
    before = gpu.told().waits
    call()
    return gpu.told().waits - before


def refusal_of(call: Callable[[], object], kind: type[Exception] = InferenceError) -> str:
    """Return why a call failed. Nothing is kept of the error, which has the call's arrays."""
    with pytest.raises(kind) as refusal:
        call()
    return str(refusal.value)


# The model waits


def test_requests_that_are_executed_together_wait_once(gpu: Gpu) -> None:
    outputs = {"SUM": "cuda:0", "PRODUCT": None, "REQUESTS": None, "WAITS": None}

    def infer_row(number: int) -> tuple[int, int]:
        row = np.full((1, 4), number, np.float32)
        with gpu.client.infer("fake_gpu_batch", {"A": gpu.array(row), "B": row}, outputs=outputs) as result:
            assert content_of(result["SUM"]).tolist() == (row + row).tolist()
            assert result["PRODUCT"].tolist() == (row * row).tolist()
            return int(result["REQUESTS"][0, 0]), int(result["WAITS"][0, 0])

    def waits_before_four_rows() -> int:
        with ThreadPoolExecutor(MOST_ROWS) as threads:
            told = set(threads.map(infer_row, range(MOST_ROWS)))
        ((together, waits),) = told
        assert together == MOST_ROWS
        return waits

    first = waits_before_four_rows()
    assert waits_before_four_rows() == first + 1


@pytest.mark.parametrize("deed", ["double", "double_where_it_is_wanted", "double_in_memory_of_its_own"])
def test_a_request_on_a_gpu_waits_once(gpu: Gpu, deed: str) -> None:
    assert waits_of(gpu, lambda: infer(gpu, deed, deed_with={"names": False}).release()) == 1


# What fails on the GPU


def test_a_kernel_that_fails_fails_the_request_and_not_the_next(gpu: Gpu) -> None:
    refusal = refusal_of(lambda: infer(gpu, "launch_what_fails"))
    assert refusal.startswith("[StatusCode.UNAVAILABLE] shm:machine: ")
    assert "failed with CUDA_ERROR_ILLEGAL_ADDRESS: " in refusal
    ask(gpu.model, gpu.url, "forget_failures")
    with infer(gpu) as result:
        assert content(result["Y"]) == (X * 2).tolist()
    assert gpu.allocations == 2  # nobody knows what the GPU still does in the first one's memory


def test_what_a_model_launched_before_it_failed_is_done_when_its_response_comes(gpu: Gpu) -> None:
    with prepared(gpu, "fail_after_launching") as call:
        x: Any = call.inputs["X"]
        gpu.fill(x, X)
        with pytest.raises(InferenceError, match="the model gave up late"):
            call.infer()
        assert DRIVER.memory(x.address + Y_OFFSET, X.shape, X.dtype).tolist() == (X * 2).tolist()


# The client waits


@pytest.fixture
def gpu_with_events(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    """A client of a model that has events from its first call on a GPU on."""
    with gpu_of(flavour_of(triton_server, "http aio"), EVENTS) as gpu:
        with infer(gpu) as result:
            content_in_order(gpu, result["Y"])
        yield gpu


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    gate = Gate(tmp_path)
    gate.close()
    return gate


def test_with_events_a_response_comes_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    with infer(
        gpu_with_events,
        "launch_what_waits_at_the_gate",
        X + 1,
        deed_with=gate.parameters(""),
        stream=gpu_with_events.streams[0],
    ) as result:
        y: Any = result["Y"]
    gate.wait_for_model()
    assert content(y) != ((X + 1) * 2).tolist()
    gate.let_go()
    assert content_in_order(gpu_with_events, y) == ((X + 1) * 2).tolist()


def test_with_events_a_prepared_call_may_be_filled_again_at_once(gpu_with_events: Gpu) -> None:
    gpu = gpu_with_events
    with prepared(gpu, "double") as call:
        found = []
        for value in range(5):
            gpu.fill(call.inputs["X"], value)
            with call.infer() as result:
                found.append(content(result["Y"])[0])
        assert found == [0, 2, 4, 6, 8]


def test_with_events_a_prepared_call_is_sent_again_only_when_the_gpu_has_ended_what_got_no_answer(
    gpu_with_events: Gpu, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has ended, but its answer was too late: nobody has looked at its events."""
    gpu = gpu_with_events
    decode = results.decode

    def too_late(*_: object) -> NoReturn:
        raise deadline_exceeded()

    with prepared(gpu, "copy_behind_the_gate", **gate.parameters("")) as call:
        gpu.fill(call.inputs["X"], X)
        monkeypatch.setattr(results, "decode", too_late)
        with pytest.raises(DeadlineExceededError):
            call.infer()
        monkeypatch.setattr(results, "decode", decode)
        gate.wait_for_model()
        with ThreadPoolExecutor(1) as thread:
            again = thread.submit(lambda: call.infer().release())
            wait([again], timeout=0.5)
            assert not again.done()
            gate.let_go()
            again.result()


def test_with_events_memory_serves_no_other_call_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    gpu = gpu_with_events
    infer(gpu, "copy_behind_the_gate", deed_with=gate.parameters(""), stream=gpu.streams[0]).release()
    gate.wait_for_model()
    with ThreadPoolExecutor(1) as thread:
        another = thread.submit(lambda: infer(gpu, x=X + 1).release())
        wait([another], timeout=0.5)  # it cannot have come to its end
        gate.let_go()
        another.result()
    assert ask(EVENTS, gpu.url, "tell_what_was_kept") == X.tolist()


def test_an_event_that_the_model_cannot_open_fails_the_call_and_not_the_next(triton_server: EmbeddedServer) -> None:
    url = triton_server.grpc_url
    told_by(EVENTS, url, "fail_next", function="cuIpcOpenEventHandle", name="CUDA_ERROR_INVALID_HANDLE", times=5)
    with gpu_of(flavour_of(triton_server), EVENTS) as gpu:
        assert "opening another process' event failed with CUDA_ERROR_INVALID_HANDLE" in refusal_of(lambda: infer(gpu))
        ask(EVENTS, url, "forget_failures")
        gpu.client.explain(EVENTS)  # looks anew what the model takes
        with infer(gpu) as result:
            assert content(result["Y"]) == (X * 2).tolist()
