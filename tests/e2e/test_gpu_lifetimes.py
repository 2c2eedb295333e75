"""Memory of GPUs is open and allocated as long as it is needed, also while a GPU still works on what was answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from shm_backend_utils.client import PoolOptions, Result
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.crash.gate import Gate
from tests.crash.processes import stub_of

from .eventually import eventually
from .fake_gpus import Gpu, X, content_of, flavour_of, gpu_of, left_here
from .loading_server import LoadingServer

NOTHING = LiveCounts()
PLACE = (X.shape, X.dtype, "cuda:0")


def infer(gpu: Gpu, x: Any = X) -> Result:
    return gpu.infer("double", gpu.array(x), PLACE, path="direct")


def infer_at_the_gate(gpu: Gpu, gate: Gate) -> Result:
    """Have the model leave work to its GPU that waits at the gate, on the stream that the user has named."""
    deed, parameters = "launch_what_waits_at_the_gate", gate.parameters("")
    return gpu.infer(deed, gpu.kept_array(X), PLACE, deed_with=parameters, cuda_stream=gpu.streams[0], path="direct")


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
    """The model has answered, and left it to its client to wait for the GPU; but the client closes."""
    gate.close()
    with gpu_of(flavour_of(triton_server), "fake_gpu_events") as gpu:
        infer(gpu).release()  # from now on the model has events
        infer_at_the_gate(gpu, gate).release()
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


# While the client goes on


def test_with_events_a_response_comes_while_the_gpu_still_works(triton_server: EmbeddedServer, gate: Gate) -> None:
    gate.close()
    with gpu_of(flavour_of(triton_server, "http aio"), "fake_gpu_events") as gpu:
        infer(gpu, X + 1).release()  # from now on the model has events
        with infer_at_the_gate(gpu, gate) as result:
            y: Any = result["Y"]
        gate.wait_for_model()
        assert not is_doubled(y)
        gate.let_go()
        gpu.cuda.synchronize_stream(gpu.streams[0], 0)
        assert is_doubled(y)
        del y
