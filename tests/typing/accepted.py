"""What users write, and what a type checker makes of it. Never executed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import shm_backend_utils
from shm_backend_utils import (
    AsyncShmClient,
    BatchCall,
    Call,
    CallerError,
    PoolOptions,
    PreparedCall,
    Result,
    ShmClient,
    ShmError,
    ShmSession,
    StreamCall,
    TensorView,
    Tls,
)
from shm_backend_utils.client import ServerUnavailableError
from shm_backend_utils.client.explanation import ClientStats, Explanation
from shm_backend_utils.client.prepared import AsyncPreparedCall
from shm_backend_utils.compat.attach import Attached, attach
from shm_backend_utils.errors import TensorError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.model import Strings, auto_complete

IMAGES = np.ones((2, 3), np.float32)

assert_type(shm_backend_utils.ShmClient, type[shm_backend_utils.client.ShmClient])
VERSION: str = shm_backend_utils.__version__


def call() -> None:
    with ShmClient("localhost:8001", pool=PoolOptions(max_bytes=1 << 30), tls=Tls()) as client:
        assert_type(client, ShmClient)
        with client.infer("m", {"X": IMAGES}, outputs={"Y": 4096}, request_id="7", priority=1) as result:
            assert_type(result, Result)
            assert_type(result["Y"], npt.NDArray[Any])
        assert_type(client.submit("m", {"X": [IMAGES, IMAGES]}), Future[Result])
        assert_type(client.stream("m", {"X": 1}), Generator[Result, None, None])
        with client.prepare("m", {"X": ((2, 3), np.float32), "S": ((2,), "S20")}) as prepared:
            assert_type(prepared, PreparedCall)
            prepared.inputs["X"][...] = IMAGES
            assert_type(prepared.infer(), Result)
        assert_type(client.explain("m"), Explanation)
        assert_type(client.stats(), ClientStats)


class Tensor:
    """Of a library for GPUs."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


def call_on_a_gpu(x: DeviceArray, tensor: Tensor, stream: object) -> None:
    with ShmClient("localhost:8001", pool=PoolOptions(lend_bytes=0, max_device_bytes=1 << 30)) as client:
        result = client.infer(
            "m", {"X": x}, outputs={"Y": "cuda:0", "Z": ((2, 3), np.float32, "cuda:0")}, cuda_stream=stream
        )
        y: Any = result["Y"]
        client.submit("m", {"X": tensor}, cuda_stream=[stream, 0], library="torch")
        with client.prepare("m", {"X": x, "W": tensor, "V": ((2, 3), "f4", "cuda:0")}, library="cupy") as prepared:
            prepared.inputs_ready(stream)
            prepared.infer(cuda_stream=stream)
        assert_type(x.to_host(), npt.NDArray[Any])
        assert_type(x[1:].reshape(2, 3), DeviceArray)
        print(y, CudaError)


async def call_from_a_task() -> None:
    async with AsyncShmClient("localhost:8001") as client:
        assert_type(client, AsyncShmClient)
        assert_type(await client.infer("m", {"X": IMAGES}), Result)
        assert_type(await client.submit("m", {"X": IMAGES}), Result)
        assert_type(client.stream("m", {"X": IMAGES}), AsyncGenerator[Result, None])
        with await client.prepare("m", {"X": ((2, 3), np.float32)}) as prepared:
            assert_type(prepared, AsyncPreparedCall)
        assert_type(await client.explain("m"), Explanation)


def keep_regions(inputs: list[Any]) -> Attached:
    return attach("m", inputs)


def complete(config: Any) -> Any:
    return auto_complete(config)


def ask(client: ShmClient) -> None:
    assert_type(client.is_model_ready("m"), bool)
    assert_type(client.get_model_config("m"), dict[str, Any])
    client.load_model("m", config="{}", files={"file:1/model.py": b""}, timeout_s=3)


async def ask_from_a_task(client: AsyncShmClient) -> None:
    assert_type(await client.is_model_ready("m", "1"), bool)
    assert_type(await client.get_inference_statistics(), dict[str, Any])


def fail() -> None:
    try:
        call()
    except (ServerUnavailableError, TensorError, CallerError) as error:
        said: ShmError = error
        print(said)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.input("X")
        assert_type(x, TensorView)
        assert_type(x.strings(), Strings)
        np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())

    def infer_on_a_gpu(self, call: Call) -> None:
        assert_type(call.to_device(call.input("X")), DeviceArray)
        assert_type(call.device_output("Y", (2, 3), np.float32), DeviceView)
        call.ready_on(0)

    def infer_batch(self, batch: BatchCall) -> None:
        assert_type(batch.input("X"), TensorView)

    def answer(self, call: StreamCall) -> Iterator[None]:
        call.put("Y", call.input("X"))
        yield

    def finalize(self) -> None:
        self.session.close()
