"""Arrays in which a client hands out what is on GPUs, and the ways of tensors there on other paths."""

from __future__ import annotations

import asyncio
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.client.paths import on_gpus
from shm_backend_utils.errors import CallerError, TensorError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.client_on_gpus.conftest import gpu_client, on_host, tensor_of, wait_until
from tests.unit.client_on_gpus.gpu_server import GpuServer
from tests.unit.fake_server import config
from tests.unit.fake_wires import async_client_of

X = np.arange(600, dtype=np.float32)
ON_GPU = {"OUT0": (X.shape, X.dtype, "cuda:0")}
ON_HOST = {"OUT0": X.nbytes}


class Wrapped:
    """What a library would make of an array."""

    def __init__(self, array: DeviceArray, library: str) -> None:
        self.array, self.library = array, library


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library is there, and its arrays are :class:`Wrapped`."""
    monkeypatch.setattr(on_gpus, "as_library", Wrapped)
    monkeypatch.setattr(on_gpus, "check_is_installed", lambda _: None)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("path", ["direct", "inline", "triton-shm"])
def test_outputs_are_of_the_library_that_is_named(driver: FakeDriver, client: ShmClient, path: Any) -> None:
    result = client.infer("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU, library="jax", path=path)
    found: Any = result["OUT0"]
    assert found.library == "jax"
    np.testing.assert_array_equal(found.array.to_host(), 2 * X)


def test_a_tensor_of_another_dtype_is_refused_as_on_the_host(driver: FakeDriver, client: ShmClient) -> None:
    with pytest.raises(TensorError, match="'IN0' is INT32, but the model's configuration says TYPE_FP32"):
        client.infer("m", {"IN0": tensor_of(driver, X.astype(np.int32))}, outputs=ON_GPU)


@pytest.mark.parametrize(("is_on_gpu", "outputs"), [(True, None), (False, {"OUT0": "cuda:0"})])
def test_a_split_call_takes_no_tensors_on_gpus(
    driver: FakeDriver, server: GpuServer, client: ShmClient, is_on_gpu: bool, outputs: Any
) -> None:
    server.configs["rows"] = config("rows", max_batch_size=4)
    rows = driver.tensor(X.reshape(300, 2)) if is_on_gpu else X.reshape(300, 2)
    with pytest.raises(CallerError, match="split=True takes tensors on the host alone; call the model once for each"):
        client.infer("rows", {"IN0": rows}, outputs=outputs, split=True)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("path", ["direct", "inline"])
def test_outputs_are_of_the_library_of_the_inputs(
    driver: FakeDriver, client: ShmClient, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    monkeypatch.setattr("shm_backend_utils.client.inputs.devices.library_of", lambda _: "cupy")
    found: Any = client.infer("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU, path=path)["OUT0"]
    assert found.library == "cupy"
    named: Any = client.infer("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU, path=path, library="torch")["OUT0"]
    assert named.library == "torch"


def test_a_torch_that_knows_no_gpu_is_refused_before_anything_is_sent(
    driver: FakeDriver, server: GpuServer, client: ShmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(CallerError, match="library is 'torch', which is built without CUDA here; install one for CUDA"):
        client.infer("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU, library="torch")
    assert server.orders == []


def test_a_list_of_tensors_on_a_gpu_is_told_how_to_become_one(driver: FakeDriver, client: ShmClient) -> None:
    with pytest.raises(
        TensorError, match=r"copy it there, or join what is in a list on its GPU, for example by torch\.cat"
    ):
        client.infer("m", {"IN0": [tensor_of(driver, X)]}, outputs=ON_GPU)


@pytest.mark.parametrize("library", ["numpy", 3])
def test_what_is_no_library_is_refused(client: ShmClient, library: Any) -> None:
    with pytest.raises(CallerError, match="library is .*; expected one of 'torch', 'cupy', 'jax', 'numba'"):
        client.infer("m", {"IN0": X}, library=library)


def test_a_library_that_is_not_there_is_told_before_anything_is_sent(
    server: GpuServer, client: ShmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CallerError, match="library is 'jax', which is not installed here"):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, library="jax")
    assert not server.orders


def test_a_copy_of_a_result_holds_no_memory_of_the_slot(client: ShmClient) -> None:
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU)
    copied: Any = result.copy()["OUT0"]
    result.release()
    client.infer("m", {"IN0": 9 * X}, outputs=ON_GPU).release()
    np.testing.assert_array_equal(copied.to_host(), 2 * X)


@pytest.mark.parametrize(("name", "is_lent"), [("BOOL", True), ("BF16", True), ("INT64", False)])
def test_every_data_type_passes(
    driver: FakeDriver, server: GpuServer, cuda: CudaAccess, name: str, is_lent: bool
) -> None:
    dtype = dtypes.BY_NAME[name]
    server.configs["typed"] = config("typed", dtype=f"TYPE_{name}")
    values = np.arange(64, dtype=np.uint8).view(dtype.numpy) if name != "BOOL" else np.arange(64) % 2 == 0
    with gpu_client(server, cuda, lend_bytes=0 if is_lent else 2**30) as client:
        client.infer(
            "typed", {"IN0": tensor_of(driver, values)}, outputs={"OUT0": (values.shape, dtype.numpy, "cuda:0")}
        )
        assert server.seen.inputs["IN0"].tobytes() == values.tobytes()


def test_what_was_learned_and_finds_no_room_is_given_up_beside_outputs_on_gpus(
    server: GpuServer, cuda: CudaAccess
) -> None:
    with gpu_client(server, cuda, max_bytes=2**22) as client:
        core: Any = client._core
        client.explain("two")
        core.known["two", ""].learned.learn({"OUT1": 2**23}, rows=1)
        result = client.infer("two", {"IN0": X, "IN1": X[:0]}, outputs={**ON_GPU, "OUT1": None})
        np.testing.assert_array_equal(on_host(result), 2 * X)
        assert len(server.seen.claims) == 1


# Other paths


@pytest.mark.parametrize(("path", "kind"), [("inline", "managed"), ("triton-shm", "pool"), ("triton-shm", "vmm")])
def test_over_the_host_every_kind_of_memory_goes(driver: FakeDriver, client: ShmClient, path: Any, kind: Any) -> None:
    x = tensor_of(driver, np.arange(1200, dtype=np.float32), kind=kind)[::2]
    result = client.infer("m", {"IN0": x}, outputs=ON_GPU, path=path)
    assert result.path == path
    np.testing.assert_array_equal(on_host(result), 4 * X)


@pytest.mark.parametrize("path", ["inline", "triton-shm"])
def test_tensors_that_could_be_lent_have_a_place_each_on_the_host(
    driver: FakeDriver, client: ShmClient, path: Any
) -> None:
    given = {f"IN{number}": tensor_of(driver, X + number) for number in range(2)}
    result = client.infer("two", given, outputs={**ON_HOST, "OUT1": X.nbytes}, path=path)
    np.testing.assert_array_equal([result["OUT0"], result["OUT1"]], [2 * X, 2 * X + 2])


@pytest.mark.parametrize(("path", "is_given"), [("inline", True), ("triton-shm", False), ("triton-shm", True)])
def test_prepared_calls_over_the_host_read_the_gpu_anew(
    driver: FakeDriver, client: ShmClient, path: Any, is_given: bool
) -> None:
    x = tensor_of(driver, X, kind="managed")
    given: Any = x if is_given else (X.shape, X.dtype, "cuda:0")
    with client.prepare("m", {"IN0": given}, outputs=ON_HOST, path=path) as call:
        array: Any = call.inputs["IN0"]
        assert (array is x) == is_given
        for times in (1, 2):
            driver.memory(array.address, X.shape, X.dtype)[:] = times * X
            np.testing.assert_array_equal(call.infer()["OUT0"], 2 * times * X)
        del array


def test_a_request_that_is_made_again_has_the_same_tensors_in_memory_of_ours(
    driver: FakeDriver, server: GpuServer, client: ShmClient
) -> None:
    refusals: list[str] = []

    def refuse(_: object) -> None:
        if refusals:
            raise InferenceError(refusals.pop())

    server.before = refuse
    for kind in ("device", "pool"):
        for refusal in ("shm:busy: somebody holds the slot", "shm:refused: it cannot be mapped"):
            refusals.append(refusal)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = client.infer("m", {"IN0": tensor_of(driver, X, kind=kind)}, outputs=ON_GPU)
            np.testing.assert_array_equal(on_host(result), 2 * X)
            assert not any(claim.is_for_one_request for claim in server.seen.claims)
            assert not refusals


def test_submitted_and_awaited_calls_have_streams_and_libraries_too(
    driver: FakeDriver, server: GpuServer, cuda: CudaAccess
) -> None:
    stream = driver.runtime().create_stream(0)
    x = tensor_of(driver, X)

    async def run() -> Any:
        async with async_client_of(server, cuda=cuda, pool=PoolOptions(lend_bytes=0)) as client:
            np.testing.assert_array_equal(
                on_host(await client.infer("m", {"IN0": x}, outputs=ON_GPU, stream=stream)), 2 * X
            )
            result = await client.submit("m", {"IN0": x}, outputs=ON_GPU, stream=stream, library=None)
            np.testing.assert_array_equal(on_host(result), 2 * X)
            with await client.prepare("m", {"IN0": x}, outputs=ON_GPU) as call:
                call.inputs_ready(stream)
                np.testing.assert_array_equal(on_host(await call.infer()), 2 * X)
                np.testing.assert_array_equal(on_host(await call.infer(stream=stream)), 2 * X)
            return client._memory.bank

    bank = asyncio.run(run())
    server.sweep()
    wait_until(lambda: not bank.collect())
    driver.runtime().destroy_stream(stream, 0)
