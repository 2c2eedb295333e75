"""Tensors on GPUs: where they go, in whose memory, how long that is open, and what is told where CUDA fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions, Result
from shm_backend_utils.client.options import PathName
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.crash.gate import Gate
from tests.crash.processes import stub_of

from .eventually import all_memory_comes_back, conversed, eventually
from .fake_gpus import DRIVER, MODEL, Gpu, X, content_of, flavour_of, gpu_of, left_here
from .flavours import Flavour
from .loading_server import LoadingServer

ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
NOTHING = LiveCounts()


@pytest.fixture
def every_gpu(flavour: Flavour) -> Iterator[Gpu]:
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


@pytest.mark.parametrize("lend_bytes", [0, 1 << 20])
def test_a_tensor_of_the_user_is_used_where_it_is(triton_server: EmbeddedServer, lend_bytes: int) -> None:
    """From a size on; smaller ones are copied on the GPU."""
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


EVERYWHERE = [None, 0, 1]
EVERY_DOUBLE = ["double", "double_where_it_is_wanted", "double_in_memory_of_its_own", "double_on_the_host"]


def from_place(gpu: Gpu, place: int | None) -> Any:
    return X if place is None else gpu.array(X, place)


def to_place(place: int | None) -> Any:
    return X.nbytes if place is None else (X.shape, X.dtype, f"cuda:{place}")


def content(array: Any, place: int | None) -> list[float]:
    """Return what is in an array now, without waiting for anything, once it is known to be in its place."""
    if place is not None:
        assert isinstance(array, DeviceArray)
        assert array.device == place
        array = content_of(array)
    assert isinstance(array, np.ndarray)
    values: list[float] = array.tolist()
    return values


@pytest.mark.parametrize("source", EVERYWHERE)
def test_a_tensor_goes_from_anywhere_to_anywhere(every_gpu: Gpu, source: int | None) -> None:
    for to, deed in itertools.product(EVERYWHERE, EVERY_DOUBLE):
        with every_gpu.infer(deed, from_place(every_gpu, source), to_place(to)) as result:
            assert (result.path, result.overflowed) == ("direct", {})
            assert content(result["Y"], to) == (X * 2).tolist()


@pytest.mark.parametrize("to", [None, 0])
def test_a_prepared_call_grows_on_the_host_and_not_on_a_gpu(gpu: Gpu, to: int | None) -> None:
    outputs: Any = {"Y": None if to is None else f"cuda:{to}"}
    with gpu.client.prepare(MODEL, {"X": ON_THE_GPU}, outputs=outputs, parameters={"deed": "double"}) as call:
        overflows = []
        for factor in (1, 2, 3):
            x: Any = call.inputs["X"]
            gpu.fill(x, factor)
            with call.infer() as result:
                assert content(result["Y"], to) == [2 * factor] * X.size
                overflows.append(bool(result.overflowed))
        assert overflows == [True, to is not None, to is not None]
    del x
    all_memory_comes_back(gpu.client)
    with gpu.client.prepare(MODEL, {"X": ON_THE_GPU}, outputs={"Y": 4000}, parameters={"deed": "double"}) as call:
        assert not call.infer().overflowed  # in memory of the same kind


def test_every_path_gives_the_same_on_the_gpu(gpu: Gpu, path: PathName) -> None:
    for source in EVERYWHERE:
        with gpu.infer("double_where_it_is_wanted", from_place(gpu, source), ON_THE_GPU, path=path) as result:
            assert result.path == path
            assert content(result["Y"], 0) == (X * 2).tolist()


def test_a_stream_brings_its_tensors_where_they_are_wanted(gpu: Gpu) -> None:
    for to in (None, 1):
        responses = gpu.client.stream(
            "countdown", {"X": gpu.array(X)}, outputs={"Y": to_place(to)}, parameters={"count": 2}
        )
        assert [content(response["Y"], to) for response in responses] == [X.tolist(), (X + 1).tolist()]


def infer(gpu: Gpu, x: Any = X) -> Result:
    return gpu.infer("double", gpu.array(x), ON_THE_GPU, path="direct")


def infer_at_the_gate(gpu: Gpu, gate: Gate) -> Result:
    """Have the model leave work to its GPU that waits at the gate, on the stream that the user has named."""
    deed, parameters = "launch_what_waits_at_the_gate", gate.parameters("")
    return gpu.infer(
        deed, gpu.kept_array(X), ON_THE_GPU, deed_with=parameters, cuda_stream=gpu.streams[0], path="direct"
    )


def is_doubled(array: Any) -> bool:
    return bool((content_of(array) == X * 2).all())


def test_memory_is_closed_and_freed_when_nobody_has_used_it_for_a_while(triton_server: EmbeddedServer) -> None:
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(idle_s=0)) as gpu:
        before = gpu.told().open_now
        infer(gpu).release()
        eventually(lambda: gpu.told("sweep").open_now == before)
        eventually(lambda: left_here()._replace(events=0, streams=0) == NOTHING)  # the client keeps idle events


def test_memory_that_a_gpu_writes_to_is_neither_closed_nor_freed(triton_server: EmbeddedServer, gate: Gate) -> None:
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


def test_a_model_that_is_unloaded_closes_all_and_one_loaded_opens_it_again(loading_server: LoadingServer) -> None:
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


@pytest.mark.parametrize(
    ("region", "function", "path"),
    [("auto", "cuMemImportFromShareableHandle", "direct"), ("system", "cuIpcOpenMemHandle", "triton-shm")],
)
def test_a_client_whose_memory_cannot_be_opened_takes_other_memory_or_another_path(
    triton_server: EmbeddedServer, region: RegionName, function: str, path: str
) -> None:
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(region=region)) as gpu:
        gpu.told("fail_next", function=function, name="CUDA_ERROR_MAP_FAILED", times=2)
        with gpu.infer("double_where_it_is_wanted", gpu.array(X), ON_THE_GPU) as result:
            assert (result.path, is_doubled(result["Y"])) == (path, True)
        gpu.client.explain(MODEL)  # checks everything anew
        with infer(gpu) as result:
            assert is_doubled(result["Y"])


@pytest.mark.parametrize("lacks", ["virtual memory", "descriptors"])
def test_gpus_that_share_nothing_by_descriptor_share_it_by_cuda_ipc(gpu: Gpu, lacks: Any) -> None:
    DRIVER.lack(lacks)
    try:
        with infer(gpu) as result:
            assert is_doubled(result["Y"])
    finally:
        DRIVER.lack()
    assert (gpu.times("cuIpcGetMemHandle"), gpu.allocations) == (1, 1)


MISSING = {
    "bindings": "GPU memory needs NVIDIA's cuda-bindings, which cannot be imported",
    "GPU": "CUDA_ERROR_NO_DEVICE: no GPU is visible here; see nvidia-smi",
}


@pytest.mark.parametrize("lacks", MISSING)
def test_a_model_that_can_use_no_gpu_says_why_and_serves_the_host(gpu: Gpu, lacks: str) -> None:
    def infer(x: Any, where: str | None) -> Result:
        return gpu.client.infer("fake_gpu_missing", {"X": x}, outputs={"Y": where}, parameters={"lacks": lacks})

    infer(X, None).release()
    for where in ("cuda:0", None):
        with pytest.raises(InferenceError, match=rf"^\[StatusCode.UNAVAILABLE\] .*{MISSING[lacks]}") as refusal:
            infer(gpu.array(X), where)
        del refusal  # which has the call's arrays
    with infer(X, None) as result:
        assert (result.path, result["Y"].tolist()) == ("direct", (X * 2).tolist())
