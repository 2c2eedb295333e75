"""Tensors on GPUs: from where they are to where they are wanted; in the same memory for both, shown by addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.client.options import PathName
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.server import EmbeddedServer

from .conversation import conversed
from .eventually import all_memory_comes_back
from .fake_gpus import DRIVER, MODEL, Gpu, X, content_of, flavour_of, gpu_of
from .flavours import Flavour


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


ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
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


@pytest.mark.parametrize("to", EVERYWHERE)
@pytest.mark.parametrize("source", EVERYWHERE)
def test_a_tensor_goes_from_anywhere_to_anywhere(gpu: Gpu, source: int | None, to: int | None) -> None:
    for deed in EVERY_DOUBLE:
        with gpu.infer(deed, from_place(gpu, source), to_place(to)) as result:
            assert (result.path, result.overflowed) == ("direct", {})
            assert content(result["Y"], to) == (X * 2).tolist()


@pytest.mark.parametrize(("source", "to"), [(0, 0), (0, None), (None, 0), (1, 0)])
def test_every_client_sends_from_gpus_and_receives_there(every_gpu: Gpu, source: int | None, to: int | None) -> None:
    with every_gpu.infer("double", from_place(every_gpu, source), to_place(to)) as result:
        assert result.path == "direct"
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


@pytest.mark.parametrize("source", EVERYWHERE)
def test_every_path_gives_the_same_on_the_gpu(gpu: Gpu, path: PathName, source: int | None) -> None:
    with gpu.infer("double_where_it_is_wanted", from_place(gpu, source), ON_THE_GPU, path=path) as result:
        assert result.path == path
        assert content(result["Y"], 0) == (X * 2).tolist()


@pytest.mark.parametrize("to", [None, 1])
def test_a_stream_brings_its_tensors_where_they_are_wanted(gpu: Gpu, to: int | None) -> None:
    responses = gpu.client.stream(
        "countdown", {"X": gpu.array(X)}, outputs={"Y": to_place(to)}, parameters={"count": 2}
    )
    assert [content(response["Y"], to) for response in responses] == [X.tolist(), (X + 1).tolist()]
