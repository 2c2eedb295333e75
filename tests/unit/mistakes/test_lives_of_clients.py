"""Clients, calls, results and streams used too late, by others, twice, or for what they are not; wrong ports."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from shm_backend_utils.client import (
    AsyncShmClient,
    CallerError,
    DeadlineExceededError,
    InferenceError,
    ServerUnavailableError,
    ShmClient,
)
from shm_backend_utils.client.errors import deadline_exceeded
from shm_backend_utils.errors import TensorError
from tests.unit.answering_server import answering
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

X = np.ones(3, np.float32)
DESCRIBED: Any = {"IN0": ((3,), np.float32)}


OTHERS = "they belong to the process that made them; make a client in each process"


def test_a_client_or_a_call_that_is_sent_to_another_process(server: FakeServer) -> None:
    with client_of(server) as client, client.prepare("m", DESCRIBED) as call:
        for sent in (client, call):
            with pytest.raises(TypeError) as error:
                pickle.dumps(sent)
            assert str(error.value) == f"{type(sent).__name__} objects cannot be pickled: {OTHERS}"

    async def send() -> None:
        async with async_client_of(server) as client:
            with pytest.raises(TypeError, match=f"^AsyncShmClient objects cannot be pickled: {OTHERS}$"):
                pickle.dumps(client)

    asyncio.run(send())


@pytest.mark.parametrize(
    ("way", "path"), [(pickle.dumps, "direct"), (copy.copy, "triton-shm"), (copy.deepcopy, "inline")]
)
def test_a_result_that_is_sent_to_another_process(server: FakeServer, way: Any, path: Any) -> None:
    with client_of(server) as client, client.infer("m", {"IN0": X}, path=path) as result:
        with pytest.raises(TypeError) as error:
            way(result)
        assert str(error.value) == (
            "a Result cannot be pickled or copied by module copy; use result.copy(), a dict of new arrays"
        )
        assert pickle.loads(pickle.dumps(result.copy()))["OUT0"].tolist() == [2, 2, 2]


def test_a_client_in_two_event_loops(server: FakeServer) -> None:
    async def make() -> Any:
        async with async_client_of(server) as client:
            with pytest.raises(CallerError) as error:
                await asyncio.to_thread(asyncio.run, infer(client))
            return str(error.value)

    async def infer(client: Any) -> None:
        await client.infer("m", {"IN0": X})

    assert asyncio.run(make()) == "this client belongs to another event loop; make one client in each loop"


@pytest.mark.parametrize(
    ("library", "used"),
    [("tritonclient", ""), ("grpc", "; ShmClient('localhost:1')"), ("httptools", "; ShmClient('http://localhost:1')")],
)
def test_without_a_library(library: str, used: str) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None\nfrom shm_backend_utils.client import ShmClient{used}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ModuleNotFoundError: shm_backend_utils.client lacks a library (")
    assert library in line
    assert line.endswith("); run pip install 'CHECKOUT_OR_WHEEL[client]'")


HELD = (
    "[StatusCode.DEADLINE_EXCEEDED] model 'stream' has no free frame for its next response: this client holds a "
    "result in each frame of the stream. Release results (leave their with blocks), keep copies (result.copy()), "
    "or ask for more frames"
)


def ten(_: Order, inputs: Arrays) -> Any:
    return ({"OUT0": inputs["IN0"] * factor} for factor in range(10))


@pytest.fixture
def streaming() -> Iterator[FakeServer]:
    streams = config("stream", model_transaction_policy={"decoupled": True})
    with FakeServer(streams, config("m"), compute=ten) as streaming:
        streaming.frame_limit_s = 0.02
        yield streaming


def ask(client: ShmClient, **named: Any) -> Iterator[Any]:
    return client.stream("stream", {"IN0": X}, **{"outputs": {"OUT0": X.nbytes}, **named})


@pytest.mark.parametrize(
    ("named", "count"),
    [({}, 8), ({"frames": 1}, 1), ({"frames": np.int64(3)}, 3), ({"outputs": {"OUT0": 2**22}}, 4)],  # fewer large ones
)
@pytest.mark.parametrize("what", ["results", "arrays", "in a task"])
def test_who_holds_every_frame_is_told(streaming: FakeServer, named: dict[str, Any], count: int, what: str) -> None:
    kept: list[Any] = []

    async def keep() -> None:
        async with async_client_of(streaming) as client:
            async for result in client.stream("stream", {"IN0": X}, **{"outputs": {"OUT0": X.nbytes}, **named}):
                kept.append(result)

    def use() -> None:
        if what == "in a task":
            asyncio.run(keep())
        with client_of(streaming) as client:
            kept.extend(result if what == "results" else result["OUT0"] for result in ask(client, **named))

    with pytest.raises(DeadlineExceededError) as error:
        use()
    assert str(error.value) == HELD
    assert len(kept) == count


def test_who_holds_fewer_is_told_that_the_server_does_not_answer(streaming: FakeServer) -> None:
    def three_and_no_more(_: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield from [{"OUT0": inputs["IN0"]}] * 3
        raise deadline_exceeded()

    streaming.compute = three_and_no_more
    kept: list[Any] = []
    with client_of(streaming) as client:
        with pytest.raises(DeadlineExceededError, match="the server did not answer before the deadline"):
            kept.extend(ask(client))
        assert len(kept) == 3


def test_frames_that_are_no_number_of_them_or_of_a_model_that_is_not_decoupled(streaming: FakeServer) -> None:
    with client_of(streaming) as client:
        with pytest.raises(CallerError) as error:
            list(client.stream("m", {"IN0": X}, frames=8))
        assert str(error.value) == (
            "frames is 8, but model 'm' is not decoupled: its stream has one response; leave frames out, or use infer()"
        )
        for frames in (0, 65, 2.5, "4"):
            with pytest.raises(CallerError) as error:
                list(ask(client, frames=frames))
            assert str(error.value) == f"frames is {frames!r}; expected a whole number, 1 to 64"


@pytest.mark.parametrize(("protocol", "status"), [("grpc", "StatusCode.UNIMPLEMENTED"), ("http", "501")])
def test_a_decoupled_model_is_not_asked_for_one_answer(protocol: Any, status: str) -> None:
    def refuse(_: Order) -> None:
        raise InferenceError("ModelInfer RPC doesn't support models with decoupled transaction policy", status)

    decoupled = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(decoupled, config("single")) as server, client_of(server, protocol) as client:
        server.before = refuse
        x = np.zeros(3, np.float32)
        told = r"model 'm' is decoupled: .*; ask for them by stream\(\), over gRPC"
        with pytest.raises(InferenceError, match=told) as error:
            client.infer("m", {"IN0": x})
        assert error.value.status() == status
        with pytest.raises(InferenceError, match=told):
            client.prepare("m", {"IN0": ((3,), np.float32)})
        users = ({"SHM_ALLOWED_UIDS": {"string_value": str(uid)}} for uid in itertools.count())
        server.config = lambda _: {**decoupled, "parameters": next(users)}  # type: ignore[assignment, method-assign]
        with pytest.raises(InferenceError, match=told):  # as replicas of a server answer in turn
            client.prepare("m", {"IN0": ((3,), np.float32)})
        del server.config
        server.configs["m"] = config("m")
        client.prepare("m", {"IN0": ((3,), np.float32)}).close()
        with pytest.raises(InferenceError, match="^((?!by stream).)*$"):
            client.infer("single", {"IN0": x})


@pytest.fixture
def client() -> Iterator[ShmClient]:
    models = [config("vector"), config("triple", dims="3"), config("image", dims="-1,-1,3")]
    with FakeServer(*models, config("rows", dims="3", max_batch_size=4)) as server, client_of(server) as client:
        yield client


def takes(dtype: str) -> str:
    return f"but the model's configuration says {dtype}"


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (
            "vector",
            np.array(3, np.float32),
            f"tensor 'IN0' has shape [], {takes('[-1]')} (-1 is any size); give it its dimensions, by "
            "array.reshape(...), or pass a plain number",
        ),
        ("triple", 3.0, f"tensor 'IN0' has shape [], {takes('[3]')}; give it its dimensions, by array.reshape(...)"),
        ("triple", np.ones(4, np.float32), f"tensor 'IN0' has shape [4], {takes('[3]')}"),
        (
            "image",
            5.0,
            f"tensor 'IN0' has shape [], {takes('[-1, -1, 3]')} (-1 is any size); give it its dimensions, by "
            "array.reshape(...)",
        ),
        (
            "rows",
            X,
            f"tensor 'IN0' has shape [3], {takes('[-1, 3]')} (-1 is any size); the first dimension is the batch: one "
            "row has shape [1, 3], as array[np.newaxis] has",
        ),
    ],
)
def test_an_array_that_the_model_does_not_take(client: ShmClient, model: str, given: Any, text: str) -> None:
    with pytest.raises(TensorError) as error:
        client.infer(model, {"IN0": given})
    assert str(error.value) == text


@pytest.mark.parametrize("shape", [(np.int64(2), np.uint8(3)), np.array([2, 3]), [2, np.int32(3)]])
def test_sizes_of_numpy_are_sizes(client: ShmClient, shape: Any) -> None:
    hint: Any = {"OUT0": (tuple(shape), np.float32)}
    with client.prepare("rows", {"IN0": (shape, np.float32)}, outputs=hint) as call:
        assert call.inputs["IN0"].shape == (2, 3)
    with client.infer("vector", {"IN0": X}, outputs={"OUT0": np.int64(100)}) as result:
        assert result["OUT0"].tolist() == [2, 2, 2]


def test_sizes_that_are_none_and_an_input_that_is_misspelt(client: ShmClient) -> None:
    for shape in ((2.0, 3), "23", (-1, 3), (None, 3)):
        described: Any = {"IN0": (shape, np.float32)}
        with pytest.raises(TensorError) as error:
            client.prepare("rows", described)
        assert str(error.value) == f"tensor 'IN0' has shape {shape!r}; expected whole numbers, 0 or more"
    with pytest.raises(TensorError) as error:
        client.infer("vector", {"in0": X})
    assert str(error.value) == "model 'vector' has no input 'in0'; it has IN0; did you mean 'IN0'?"


Infer = Callable[[str], None]
METRICS = {"mute": (400, b""), "talkative": (200, b"# HELP nv_inference_request_success Number of")}
NO_SUCH_PATH = 404, b'{"error":"Not Found"}'  # as Triton answers


def infer_at(url: str) -> None:
    with ShmClient(url, timeout_s=10) as client:
        client.infer("m", {"X": X})


def infer_in_a_task_at(url: str) -> None:
    async def run() -> None:
        async with AsyncShmClient(url, timeout_s=10) as client:
            await client.infer("m", {"X": X})

    asyncio.run(run())


either = pytest.mark.parametrize("use", [infer_at, infer_in_a_task_at])


@pytest.fixture(params=METRICS)
def metrics_port(request: pytest.FixtureRequest) -> Iterator[str]:
    with answering(lambda _: METRICS[request.param]) as url:
        yield url


@either
def test_http_to_the_metrics_and_grpc_to_http(metrics_port: str, use: Infer) -> None:
    with pytest.raises(InferenceError) as error:
        use(metrics_port)
    assert str(error.value).endswith(
        "; is this Triton's HTTP port? By default HTTP is on 8000, and metrics are on 8002"
    )
    url = metrics_port.removeprefix("http://")
    with pytest.raises(ServerUnavailableError) as unavailable:
        use(url)
    assert str(unavailable.value).startswith(
        f"[StatusCode.UNAVAILABLE] the server at grpc://{url} speaks HTTP, and not gRPC; check the port. "
        "Triton's gRPC is on 8001 by default, its HTTP on 8000, as http://HOST:PORT ("
    )


@either
def test_http_with_a_path_that_the_server_has_not(use: Infer) -> None:
    with answering(lambda _: NO_SUCH_PATH) as url:
        with pytest.raises(InferenceError) as error:
            use(f"{url}/v2")
        assert str(error.value) == (
            f"[404] the server finds nothing there; check the path in {url}/v2: Triton itself needs no path"
        )
        with pytest.raises(InferenceError, match=r"^\[404\] Not Found$"):
            use(url)


@either
def test_http_to_grpc(use: Infer) -> None:
    with ThreadPoolExecutor(1) as executor:
        server = grpc.server(executor)
        url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with pytest.raises(ServerUnavailableError) as error:
            use(url)
        server.stop(None).wait()
    assert str(error.value) == (
        f"[StatusCode.UNAVAILABLE] the server at {url} does not speak HTTP, or only with TLS (https://); check the "
        "port. Triton's HTTP is on 8000 by default, and its gRPC on 8001, as grpc://HOST:PORT"
    )
