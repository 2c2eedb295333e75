"""Tensors on GPUs: from where they are to where they are wanted, on every path; and host memory pinned for copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.tensors.cuda.device_array import DeviceArray

from .eventually import all_memory_comes_back
from .fake_gpus import MODEL, Gpu, X, content_of, flavour_of, gpu_of
from .flavours import Flavour

ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
EVERYWHERE = [None, 0, 1]
EVERY_DOUBLE = ["double", "double_where_it_is_wanted", "double_in_memory_of_its_own", "double_on_the_host"]


@pytest.fixture
def every_gpu(flavour: Flavour) -> Iterator[Gpu]:
    """Each of the four clients."""
    with gpu_of(flavour) as gpu:
        yield gpu


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    """One client, where it does not matter which."""
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


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


def test_a_prepared_call_is_filled_on_the_gpu_on_every_path(gpu: Gpu, path: PathName) -> None:
    with gpu.client.prepare(
        MODEL,
        {"X": (X.shape, X.dtype, "cuda:1")},
        outputs={"Y": ON_THE_GPU},
        parameters={"deed": "double_where_it_is_wanted"},
        path=path,
    ) as call:
        assert call.path == path
        for value in range(3):
            x: Any = call.inputs["X"]
            gpu.fill(x, value)  # on a stream: not done yet
            with call.infer() as result:
                assert content(result["Y"], 0) == [2 * value] * X.size


def test_an_output_of_unknown_size_comes_to_the_gpu_and_the_next_one_directly(gpu: Gpu) -> None:
    overflowed = []
    for _ in range(2):
        with gpu.infer("repeat", gpu.array(X), "cuda:0", path="direct") as result:
            overflowed.append(dict(result.overflowed))
            assert content(result["Y"], 0) == X.tolist() * 3
    assert overflowed == [{"Y": 3 * X.nbytes}, {}]


@pytest.mark.parametrize("to", [None, 1])
def test_a_stream_brings_its_tensors_where_they_are_wanted(gpu: Gpu, to: int | None) -> None:
    responses = gpu.client.stream(
        "countdown", {"X": gpu.array(X)}, outputs={"Y": to_place(to)}, parameters={"count": 2}
    )
    assert [content(response["Y"], to) for response in responses] == [X.tolist(), (X + 1).tolist()]


# Regions on the host that a model registers with CUDA, so that copies to a GPU need no staging buffer
