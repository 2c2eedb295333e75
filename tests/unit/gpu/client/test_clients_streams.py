"""Streams and arrays of the user's libraries: work that a call comes behind, and what is handed out."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, PoolOptions, ShmClient
from shm_backend_utils.client.paths import on_gpus
from shm_backend_utils.errors import CallerError, ClosedError, TensorError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.protocol.claims import CudaRegionClaim
from tests.unit.fake_server import config
from tests.unit.fake_wires import async_client_of
from tests.unit.gpu.client.conftest import (
    ON_GPU,
    ON_HOST,
    PLACE,
    X,
    address_of,
    doubled,
    gpu_client,
    now,
    on_host,
    tensor_of,
    wait_until,
)
from tests.unit.gpu.client.gpu_server import GpuServer
from tests.unit.gpu.fakes import DRIVER, held_back, in_another_thread, stream_on

LATE_S = 0.1


def put_late(stream: int, function: Callable[[], object]) -> None:
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    DRIVER.launch(stream, function)


def written_late(stream: int, **options: Any) -> Any:
    """Return a tensor that is written on a stream, late; and no library knows."""
    tensor = tensor_of(np.zeros_like(X), **options)
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    tensor.write(X, stream)
    tensor.stream = None
    return tensor


@pytest.fixture
def event(runtime: CudaRuntime) -> Iterator[Any]:
    handle = runtime.create_event(0)
    yield type("Event", (), {"ptr": handle})()
    runtime.destroy_event(handle, 0)


@pytest.mark.parametrize("kind", ["device", "pool"], ids=["lent", "copied"])
@pytest.mark.parametrize("named", ["stream", "event", "nothing"])
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_late_work_is_waited_for(
    server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int, event: Any, kind: str, named: str
) -> None:
    x = written_late(stream, kind=kind)
    with runtime.on(0):
        runtime.record(event.ptr, stream)
    by = {"stream": SimpleNamespace(__cuda_stream__=lambda: (0, stream)), "event": event, "nothing": None}[named]
    np.testing.assert_array_equal(doubled(client, x, cuda_stream=by), 2 * X)
    np.testing.assert_array_equal(server.inputs["IN0"], X)


def test_a_librarys_own_stream_counts(server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    x = tensor_of(X)
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    x.write(2 * X, stream)
    with stream_on(runtime) as idle:
        client.infer("m", {"IN0": x}, outputs=ON_HOST, cuda_stream=idle)
    np.testing.assert_array_equal(server.inputs["IN0"], 2 * X)


@pytest.mark.parametrize("before", ["stream", "event", "nothing"])
def test_a_result_is_read_first(client: ShmClient, runtime: CudaRuntime, stream: int, event: Any, before: str) -> None:
    named = {"stream": stream, "event": event, "nothing": None}[before]
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=named)
    address, read = address_of(result), []
    put_late(stream, lambda: read.append(now(address).copy()))
    result.release()
    with stream_on(runtime) as another:
        again = in_another_thread(lambda: client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=another))
    assert address_of(again) == address
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(read[0], 2 * X)


@pytest.mark.parametrize("stream", ["fast", -5], ids=str)
def test_what_is_no_stream_is_refused_with_and_without_gpus(client: ShmClient, stream: object) -> None:
    with pytest.raises(CallerError, match=r"stream|expected"):
        client.infer("m", {"IN0": X}, cuda_stream=stream)


def test_a_late_stream_ends_the_call_in_time(server: GpuServer, client: ShmClient, stream: int) -> None:
    x = tensor_of(X)
    client.infer("m", {"IN0": x}, outputs=ON_GPU).release()  # makes memory
    late = "earlier work on its GPU, or the copy of its inputs, was not done; its request was not sent"
    with held_back(stream, process=0), pytest.raises(DeadlineExceededError, match=late):
        client.infer("m", {"IN0": x}, outputs=ON_GPU, cuda_stream=stream, timeout_s=0.1)
    assert len(server.orders) == 1
    np.testing.assert_array_equal(doubled(client, x, cuda_stream=stream), 2 * X)


def test_what_is_submitted_on_a_threads_own_stream_is_ready(server: GpuServer, client: ShmClient) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early, server.work_s = True, LATE_S
    result = client.submit("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=2).result()
    np.testing.assert_array_equal(now(address_of(result)), 6 * X)


@pytest.mark.parametrize("way", ["inputs_ready", "infer", "neither"])
def test_a_prepared_call_comes_behind_what_is_named(client: ShmClient, stream: int, way: str) -> None:
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        array: Any = call.inputs["IN0"]
        memory = now(array.address)
        del array
        for times in (1, 2):
            put_late(stream, functools.partial(np.copyto, memory, times * X))
            if way == "inputs_ready":
                call.inputs_ready(stream)
            result = call.infer(cuda_stream=stream if way == "infer" else None)
            np.testing.assert_array_equal(on_host(result), 2 * times * X)


def test_names_are_for_one_request(server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    x = tensor_of(X)
    with stream_on(runtime) as idle, client.prepare("m", {"IN0": x}, outputs=ON_HOST) as call:
        call.inputs_ready(idle)
        call.infer()
        put_late(stream, functools.partial(np.copyto, x.peek(), 3 * X))
        call.infer()
        np.testing.assert_array_equal(server.inputs["IN0"], 3 * X)
        call.close()
        with pytest.raises(ClosedError):
            call.inputs_ready(idle)


class Wrapped:
    def __init__(self, array: DeviceArray, library: str) -> None:
        self.array, self.library = array, library


@pytest.mark.parametrize("path", ["direct", "inline", "triton-shm"])
@pytest.mark.parametrize("library", [None, "jax"], ids=["of the inputs", "named"])
def test_outputs_are_of_a_library(client: ShmClient, monkeypatch: pytest.MonkeyPatch, path: Any, library: Any) -> None:
    monkeypatch.setattr("shm_backend_utils.client.inputs.devices.library_of", lambda _: "cupy")
    monkeypatch.setattr(on_gpus, "check_is_installed", lambda _: None)
    monkeypatch.setattr(on_gpus, "as_library", Wrapped)
    named = {"library": library} if library else {}
    found: Any = client.infer("m", {"IN0": tensor_of(X)}, outputs=ON_GPU, path=path, **named)["OUT0"]
    assert found.library == (library or "cupy")
    np.testing.assert_array_equal(found.array.to_host(), 2 * X)


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("numpy", "expected one of 'torch', 'cupy', 'jax', 'numba'"),
        (3, "expected one of 'torch', 'cupy', 'jax', 'numba'"),
        ("jax", "library is 'jax', which is not installed here"),
        ("torch", "library is 'torch', which is built without CUDA here; install a build with CUDA"),
    ],
)
def test_a_library_that_cannot_be_used_is_refused_before_anything_is_sent(
    server: GpuServer, client: ShmClient, monkeypatch: pytest.MonkeyPatch, library: Any, text: str
) -> None:
    if library == "torch":
        torch: Any = ModuleType("torch")
        torch.__spec__ = ModuleSpec("torch", None)
        torch.backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: False))
        monkeypatch.setitem(sys.modules, "torch", torch)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CallerError, match=text):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, library=library)
    assert server.orders == []


def test_a_tensor_of_another_dtype_or_in_a_list_is_refused_as_on_the_host(client: ShmClient) -> None:
    with pytest.raises(TensorError, match="'IN0' is INT32, but the model's configuration says TYPE_FP32"):
        client.infer("m", {"IN0": tensor_of(X.astype(np.int32))}, outputs=ON_GPU)
    way_out = r"copy it there, or join the parts of a list on their GPU, for example by torch\.cat"
    with pytest.raises(TensorError, match=way_out):
        client.infer("m", {"IN0": [tensor_of(X)]}, outputs=ON_GPU)


@pytest.mark.parametrize(("is_on_gpu", "outputs"), [(True, None), (False, {"OUT0": "cuda:0"})])
def test_split_takes_no_tensors_on_gpus(server: GpuServer, client: ShmClient, is_on_gpu: bool, outputs: Any) -> None:
    server.configs["rows"] = config("rows", max_batch_size=4)
    rows = DRIVER.tensor(X.reshape(300, 2)) if is_on_gpu else X.reshape(300, 2)
    with pytest.raises(CallerError, match="split=True takes only tensors on the host; call the model once for each"):
        client.infer("rows", {"IN0": rows}, outputs=outputs, split=True)


def test_a_copy_of_a_result_holds_no_memory_of_the_slot(client: ShmClient) -> None:
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU)
    copied: Any = result.copy()["OUT0"]
    result.release()
    client.infer("m", {"IN0": 9 * X}, outputs=ON_GPU).release()
    np.testing.assert_array_equal(copied.to_host(), 2 * X)


def test_a_learned_size_without_room_is_given_up(server: GpuServer, cuda: CudaAccess) -> None:
    with gpu_client(server, cuda, max_bytes=2**22) as client:
        core: Any = client._core
        client.explain("two")
        core.known["two", ""].learned.learn({"OUT1": 2**23}, rows=1)
        result = client.infer("two", {"IN0": X, "IN1": X[:0]}, outputs={**ON_GPU, "OUT1": None})
        np.testing.assert_array_equal(on_host(result), 2 * X)
        assert len(server.claims) == 1


@pytest.mark.parametrize(("path", "kind"), [("inline", "managed"), ("triton-shm", "pool"), ("triton-shm", "vmm")])
def test_over_the_host_every_kind_of_memory_goes(client: ShmClient, path: Any, kind: Any) -> None:
    x = tensor_of(np.arange(1200, dtype=np.float32), kind=kind)[::2]
    result = client.infer("m", {"IN0": x}, outputs=ON_GPU, path=path)
    assert result.path == path
    np.testing.assert_array_equal(on_host(result), 4 * X)


@pytest.mark.parametrize("path", ["inline", "triton-shm"])
def test_over_the_host_cuda_need_not_share_memory(client: ShmClient, path: Any) -> None:
    for function in ("cuIpcGetMemHandle", "cuMemCreate"):
        DRIVER.fail_next(function, "CUDA_ERROR_NOT_SUPPORTED", times=100)
    np.testing.assert_array_equal(doubled(client, tensor_of(X), path=path), 2 * X)
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU, path=path) as call:
        array: Any = call.inputs["IN0"]
        now(array.address)[:] = X
        np.testing.assert_array_equal(on_host(call.infer()), 2 * X)
        del array


@pytest.mark.parametrize("path", ["inline", "triton-shm"])
def test_tensors_that_could_be_lent_have_a_place_each_on_the_host(client: ShmClient, path: Any) -> None:
    given = {f"IN{number}": tensor_of(X + number) for number in range(2)}
    result = client.infer("two", given, outputs={**ON_HOST, "OUT1": X.nbytes}, path=path)
    np.testing.assert_array_equal([result["OUT0"], result["OUT1"]], [2 * X, 2 * X + 2])


@pytest.mark.parametrize(("path", "is_given"), [("inline", True), ("triton-shm", False), ("triton-shm", True)])
def test_prepared_calls_over_the_host_read_the_gpu_anew(client: ShmClient, path: Any, is_given: bool) -> None:
    x = tensor_of(X, kind="managed")
    given: Any = x if is_given else (X.shape, X.dtype, "cuda:0")
    with client.prepare("m", {"IN0": given}, outputs=ON_HOST, path=path) as call:
        array: Any = call.inputs["IN0"]
        assert (array is x) == is_given
        for times in (1, 2):
            DRIVER.memory(array.address, X.shape, X.dtype)[:] = times * X
            np.testing.assert_array_equal(call.infer()["OUT0"], 2 * times * X)
        del array


@pytest.mark.parametrize("kind", ["device", "pool"])
@pytest.mark.parametrize("refusal", ["shm:busy: somebody holds the slot", "shm:refused: it cannot be mapped"])
@pytest.mark.filterwarnings("ignore")
def test_a_second_try_uses_memory_of_ours(server: GpuServer, client: ShmClient, kind: str, refusal: str) -> None:
    refusals = [refusal]

    def refuse(_: object) -> None:
        if refusals:
            raise InferenceError(refusals.pop())

    server.before = refuse
    np.testing.assert_array_equal(doubled(client, tensor_of(X, kind=kind)), 2 * X)
    assert not any(isinstance(claim, CudaRegionClaim) and claim.is_for_one_request for claim in server.claims)
    assert not refusals


def test_tasks_have_streams_and_libraries_too(server: GpuServer, cuda: CudaAccess, stream: int) -> None:
    x = tensor_of(X)
    named: Any = {"outputs": ON_GPU, "cuda_stream": stream}

    async def run() -> Any:
        async with async_client_of(server, cuda=cuda, pool=PoolOptions(lend_bytes=0)) as client:
            results = [await client.infer("m", {"IN0": x}, **named)]
            results.append(await client.submit("m", {"IN0": x}, library=None, **named))
            with await client.prepare("m", {"IN0": x}, outputs=ON_GPU) as call:
                call.inputs_ready(stream)
                for cuda_stream in (None, stream):
                    np.testing.assert_array_equal(on_host(await call.infer(cuda_stream=cuda_stream)), 2 * X)
            for result in results:
                np.testing.assert_array_equal(on_host(result), 2 * X)
            return client._memory.bank

    bank = asyncio.run(run())
    server.sweep()
    wait_until(lambda: not bank.collect())
