"""Memory of GPUs is open and allocated as long as it is needed, also while a GPU still works on what was answered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from shm_backend_utils.client import PoolOptions, Result
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.crash.gate import Gate
from tests.crash.processes import stub_of

from .eventually import eventually
from .fake_gpus import Gpu, X, ask, content_of, flavour_of, gpu_of, left_here
from .loading_server import LoadingServer

NOTHING = LiveCounts()


def infer(gpu: Gpu, deed: str = "double", device: int = 0, to: int | None = None, **options: Any) -> Result:
    where = (X.shape, X.dtype, f"cuda:{device if to is None else to}")
    return gpu.infer(deed, gpu.array(X, device), where, path="direct", **options)


def is_doubled(array: Any) -> bool:
    return bool((content_of(array) == X * 2).all())


# In the model


def test_memory_is_closed_and_freed_when_nobody_has_used_it_for_a_while(triton_server: EmbeddedServer) -> None:
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(idle_s=0)) as gpu:
        before = gpu.told().open_now
        infer(gpu).release()
        eventually(lambda: gpu.told("sweep").open_now == before)
        eventually(lambda: left_here() == NOTHING)


# While a model still writes


def test_memory_that_a_gpu_still_writes_to_is_neither_closed_nor_freed(
    triton_server: EmbeddedServer, gate: Gate
) -> None:
    gate.close()
    """The model has answered, and left it to its client to wait for the GPU; but the client closes."""
    with gpu_of(flavour_of(triton_server), "fake_gpu_events") as gpu:
        infer(gpu).release()  # from now on the model has events
        gpu.infer(
            "launch_what_waits_at_the_gate",
            gpu.kept_array(X),
            (X.shape, X.dtype, "cuda:0"),
            deed_with=gate.parameters(""),
            stream=gpu.streams[0],
            path="direct",
        ).release()
        gate.wait_for_model()
        gpu.client.close()
        with ThreadPoolExecutor(1) as thread:
            swept = thread.submit(gpu.told, "sweep")
            wait([swept], timeout=1)  # a model that waits for the GPU before it closes anything cannot have answered
            assert left_here().allocations >= 1
            gate.let_go()
            told = swept.result()
        eventually(lambda: gpu.told().finished == told.launched)


# When the model goes


def test_a_model_that_is_unloaded_closes_everything_and_one_that_is_loaded_opens_it_again(
    loading_server: LoadingServer,
) -> None:
    server, model = loading_server.server, "fake_gpu_pinned"
    loading_server.copy("fake_gpu", "fake_gpu")  # whose code the other one has
    loading_server.copy(model, model)
    loading_server.grpc.load_model(model)
    with gpu_of(flavour_of(server), model) as gpu:
        infer(gpu).release()
        loading_server.grpc.unload_model(model)
        eventually(lambda: stub_of(server, model) is None)
        assert f"became {NOTHING}, []" in server.log_file.read_text(errors="replace")
        loading_server.grpc.load_model(model)
        with infer(gpu) as result:
            assert is_doubled(result["Y"])
        assert (gpu.told().opens, gpu.allocations) == (1, 1)


EVENTS = "fake_gpu_events"
ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


def infer_with_events(gpu: Gpu, deed: str = "double", x: Any = X, where: Any = ON_THE_GPU, **options: Any) -> Result:
    return gpu.infer(deed, gpu.kept_array(x), where, path="direct", **options)


def content(array: Any) -> list[float]:
    """Return what is in an array now, without waiting for anything."""
    values: list[float] = content_of(array).tolist()
    return values


def content_in_order(gpu: Gpu, array: Any) -> list[float]:
    """Return what is in an array when the user's stream, which the call was given, has come there."""
    gpu.cuda.synchronize_stream(gpu.streams[0], 0)
    return content(array)


@pytest.fixture
def gpu_with_events(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    """A client of a model that has events from its first call on a GPU on."""
    with gpu_of(flavour_of(triton_server, "http aio"), EVENTS) as gpu:
        with infer_with_events(gpu) as result:
            content_in_order(gpu, result["Y"])
        yield gpu


def test_with_events_a_response_comes_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    gate.close()
    with infer_with_events(
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


def test_with_events_memory_serves_no_other_call_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    gate.close()
    gpu = gpu_with_events
    infer_with_events(gpu, "copy_behind_the_gate", deed_with=gate.parameters(""), stream=gpu.streams[0]).release()
    gate.wait_for_model()
    with ThreadPoolExecutor(1) as thread:
        another = thread.submit(lambda: infer_with_events(gpu, x=X + 1).release())
        wait([another], timeout=0.5)  # it cannot have come to its end
        gate.let_go()
        another.result()
    assert ask(EVENTS, gpu.url, "tell_what_was_kept") == X.tolist()
