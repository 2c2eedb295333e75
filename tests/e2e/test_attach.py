"""Code that stays on plain tritonclient takes the direct path by what `attach` makes of its inputs and outputs."""

from __future__ import annotations

import base64
import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.attach import Attached, CudaRegion, attach
from shm_backend_utils.errors import CallerError, TableError, TensorError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda import FakeDriver

from ..crash.gate import Gate
from .fake_gpus import DRIVER, MODEL, X, flavour_of, gpu_of
from .plain_client import PlainClient

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
SIZE = 4096
ROW = A.nbytes


class User(PlainClient):
    """One who has made and registered a region: half of it for inputs, half for outputs."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        super().__init__(protocol, server)
        self.own = self.region(SIZE)

    def read(self, offset: int, dtype: Any = np.int32, shape: tuple[int, ...] = A.shape) -> npt.NDArray[Any]:
        copy: npt.NDArray[Any] = self.own.view(dtype, shape, offset).copy()
        return copy

    def input(self, name: str, shape: list[int], datatype: str, byte_size: int, offset: int = 0) -> Any:
        made = self.module.InferInput(name, shape, datatype)
        return made.set_shared_memory(self.own.name, byte_size, offset)

    def output(self, name: str, byte_size: int = ROW, offset: int = SIZE // 2) -> Any:
        made = self.module.InferRequestedOutput(name)
        made.set_shared_memory(self.own.name, byte_size, offset)
        return made

    def add_sub(self) -> tuple[list[Any], list[Any]]:
        """Return the inputs and outputs of a request to `add_sub`, as Triton's shared memory has them."""
        self.own.write(A, B)
        inputs = [self.input("INPUT0", [1, 16], "INT32", ROW), self.input("INPUT1", [1, 16], "INT32", ROW, ROW)]
        return inputs, [self.output("OUTPUT0"), self.output("OUTPUT1", offset=SIZE // 2 + ROW)]


@pytest.fixture
def user(protocol: str, triton_server: EmbeddedServer) -> Iterator[User]:
    with contextlib.closing(User(protocol, triton_server)) as user:
        yield user


def send_in_a_stream(user: User, attached: Attached) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    user.client.start_stream(lambda result, error: answers.put(error or result))
    user.client.async_stream_infer("add_sub", **attached)
    try:
        return answers.get(timeout=30)
    finally:
        user.client.stop_stream()


@pytest.mark.parametrize(("protocol", "is_stream"), [("grpc", False), ("http", False), ("grpc", True)], ids=str)
def test_the_model_works_in_the_users_own_region(user: User, is_stream: bool) -> None:
    inputs, outputs = user.add_sub()
    attached = attach("add_sub", inputs, outputs, batch_size=1)
    response = send_in_a_stream(user, attached) if is_stream else user.client.infer("add_sub", **attached)
    assert np.array_equal(user.read(SIZE // 2), A + B)
    assert np.array_equal(user.read(SIZE // 2 + ROW), A - B)
    assert user.tensors_of(response) == {}


def test_an_input_without_a_place_travels_with_the_request(user: User) -> None:
    inputs, outputs = user.add_sub()
    attached = attach("add_sub", [inputs[0], user.in_band("INPUT1", B * 10)], outputs, batch_size=1)
    user.client.infer("add_sub", **attached)
    assert np.array_equal(user.read(SIZE // 2), A + B * 10)
    user.client.infer("add_sub", inputs, outputs=outputs)  # they are as they were, for Triton's own shared memory
    assert np.array_equal(user.read(SIZE // 2), A + B)


def test_an_output_that_cannot_lie_there_comes_with_the_response(user: User) -> None:
    inputs, outputs = user.add_sub()
    without_a_place = user.module.InferRequestedOutput("OUTPUT1")
    for output in (without_a_place, user.output("OUTPUT1", ROW - 4, SIZE // 2 + ROW)):
        attached = attach("add_sub", inputs, [outputs[0], output], batch_size=1)
        response = user.client.infer("add_sub", **attached)
        assert np.array_equal(user.read(SIZE // 2), A + B)
        assert np.array_equal(response.as_numpy("OUTPUT1"), A - B)


def test_the_users_parameters_are_kept_and_without_batches_there_is_no_input_at_all(user: User) -> None:
    user.own.write(np.ones(2, np.float32))
    inputs, outputs = [user.input("X", [2], "FP32", 8)], [user.output("Y", 24)]
    attached = attach("repeat", inputs, outputs, parameters={"times": 3})
    assert attached["inputs"] == []
    user.client.infer("repeat", **attached)
    assert user.read(SIZE // 2, np.float32, (6,)).tolist() == [1] * 6


def test_memory_of_a_gpu(triton_server: EmbeddedServer) -> None:
    half, begin = 4096, 512
    with gpu_of(flavour_of(triton_server)) as gpu:
        allocation = CudaAllocation(gpu.cuda, begin + 2 * half, 0)
        memory = DRIVER.memory(allocation.address + begin, (2, half // X.itemsize), X.dtype)
        memory[0, : X.size] = X
        x = tritonclient.grpc.InferInput("X", [X.size], "FP32").set_shared_memory("on_gpu", X.nbytes)
        y = tritonclient.grpc.InferRequestedOutput("Y")
        y.set_shared_memory("on_gpu", X.nbytes, half)
        region = CudaRegion(base64.b64encode(allocation.handle), 0, 2 * half, begin)
        access, deed = CudaAccess(lambda: gpu.cuda), {"deed": "double"}
        attached = attach(MODEL, [x], [y], cuda_regions={"on_gpu": region}, parameters=deed, cuda=access)
        with tritonclient.grpc.InferenceServerClient(triton_server.grpc_url) as client:
            client.infer(MODEL, **attached)
        assert memory[1, : X.size].tolist() == (X * 2).tolist()
        allocation.free()
        del allocation


def test_a_region_that_is_unregistered_during_a_call_serves_that_one_alone(user: User, tmp_path: Path) -> None:
    """Triton refuses that where it uses a region itself; of the model's use it knows nothing."""
    gate = Gate(tmp_path)
    gate.close()
    x = np.arange(4, dtype=np.float32)
    user.own.write(x)
    inputs, outputs = [user.input("X", [4], "FP32", 16)], [user.output("Y", 16)]
    attached = attach("crash_stages", inputs, outputs, parameters=gate.parameters("half written"))

    def infer() -> None:
        with user.module.InferenceServerClient(user.url) as client:  # over HTTP, one belongs to its thread
            client.infer("crash_stages", **attached)

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(infer)
        gate.wait_for_model()
        user.client.unregister_system_shared_memory(user.own.name)
        gate.let_go()
        answer.result()
    assert user.read(SIZE // 2, np.float32, (4,)).tolist() == (x + 1).tolist()
    with pytest.raises(InferenceServerException, match="shm:gone"):
        user.client.infer("crash_stages", **attached)


def given(datatype: str = "FP32", byte_size: int = 16) -> Any:
    """Return an input of four elements that is said to lie in a region."""
    return tritonclient.grpc.InferInput("X", [4], datatype).set_shared_memory("region", byte_size)


WANTED: Final = tritonclient.grpc.InferRequestedOutput("Y")
WANTED.set_shared_memory("region", 16, SIZE // 2)


def on_a_gpu(handle: bytes, byte_size: int = SIZE, offset: int = 0) -> dict[str, Any]:
    region = CudaRegion(handle, 0, byte_size, offset)
    return {"cuda_regions": {"region": region}, "cuda": CudaAccess(FakeDriver.load().runtime)}


CLAIM: Final = base64.b64encode(bytes(64))
BEGINS: Final = "CUDA region 'region' begins at byte {} and has {} bytes; expected"
WRONG: Final[dict[str, tuple[dict[str, Any], type[Exception], str]]] = {
    "another size": ({"inputs": [given(byte_size=20)]}, TableError, "byte_size: found 20, expected the size of its"),
    "a tensor beyond its region": (on_a_gpu(CLAIM, 8), TableError, "X: found an end at byte 16, expected at most 8"),
    "a region on a GPU without bytes": (on_a_gpu(CLAIM, 0), CallerError, BEGINS.format(0, 0)),
    "a region on a GPU before its handle's memory": (on_a_gpu(CLAIM, 8, -1), CallerError, BEGINS.format(-1, 8)),
    "a handle that is no base64": (on_a_gpu(b"no base64!"), CallerError, "not base64; expected the"),
    "nothing to attach": (
        {"inputs": [tritonclient.grpc.InferInput("X", [4], "FP32")], "outputs": []},
        CallerError,
        "no tensor for model 'direct_only' has a place in shared memory; call",
    ),
    "a batch size alone": ({"inputs": [], "batch_size": 1}, TensorError, "but no inputs; give inputs"),
    "an array": ({"inputs": [A]}, CallerError, "found type ndarray; expected tritonclient's InferInput and InferReq"),
    "an input twice": ({"inputs": [given(), given()]}, TensorError, "input 'X' is given 2 times"),
    "a descriptor": ({"parameters": {"shm_io": "{}"}}, CallerError, "'shm_io' is set by attach itself; leave it out"),
    "another data type": ({"inputs": [given("FP8", 4)]}, TensorError, "data type 'FP8'; expected one of BOOL, "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_before_anything_is_sent(what: str) -> None:
    given_otherwise, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        attach("direct_only", **{"inputs": [given()], "outputs": [WANTED], **given_otherwise})


def test_what_the_model_refuses(user: User) -> None:
    inputs, outputs = user.add_sub()
    with pytest.raises(InferenceServerException, match="has a batch of 1, but the request has one of 2"):
        user.client.infer("add_sub", **attach("add_sub", inputs, outputs, batch_size=2))
    attached = attach("unaware", [user.input("X", [4], "FP32", 16)], [user.output("Y", 16)])
    with pytest.raises(InferenceServerException, match="expected 1 inputs but got 0 inputs|input"):
        user.client.infer("unaware", **attached)
