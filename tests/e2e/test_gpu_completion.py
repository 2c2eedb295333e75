"""A response leaves while its GPU still works: the client waits for that by an event, in another process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from shm_backend_utils.client import Result
from shm_backend_utils.server import EmbeddedServer
from tests.crash.gate import Gate

from .fake_gpus import Gpu, X, ask, content_of, flavour_of, gpu_of

EVENTS = "fake_gpu_events"
ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


def infer(gpu: Gpu, deed: str = "double", x: Any = X, where: Any = ON_THE_GPU, **options: Any) -> Result:
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
        with infer(gpu) as result:
            content_in_order(gpu, result["Y"])
        yield gpu


def test_with_events_a_response_comes_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    gate.close()
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


def test_with_events_memory_serves_no_other_call_while_the_gpu_still_works(gpu_with_events: Gpu, gate: Gate) -> None:
    gate.close()
    gpu = gpu_with_events
    infer(gpu, "copy_behind_the_gate", deed_with=gate.parameters(""), stream=gpu.streams[0]).release()
    gate.wait_for_model()
    with ThreadPoolExecutor(1) as thread:
        another = thread.submit(lambda: infer(gpu, x=X + 1).release())
        wait([another], timeout=0.5)  # it cannot have come to its end
        gate.let_go()
        another.result()
    assert ask(EVENTS, gpu.url, "tell_what_was_kept") == X.tolist()
