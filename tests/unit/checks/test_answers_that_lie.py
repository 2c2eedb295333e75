"""What a server says of an output becomes neither a type nor a size unchecked: a lie is a PeerError, no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.transports.http.codec import Answer, HttpCodec
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.managed import array_at
from tests.unit import fake_wires
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X: Final = np.arange(4, dtype=np.float32)


@dataclass
class Lie:
    """What is said of the only output, and what is sent with it, in place of the truth."""

    name: Any = "OUT0"
    datatype: Any = "FP32"
    shape: Any = (4,)
    content: bytes = X.tobytes()


LIES: Final = {
    "strings in place of numbers": Lie(datatype="BYTES", shape=(1,)),
    "strings that their lengths lead beyond": Lie(datatype="BYTES", shape=(4,), content=b"\xff\xff\xff\x7fabcd"),
    "numbers of another size": Lie(datatype="FP64", shape=(4,), content=bytes(32)),
    "no type of Triton's": Lie(datatype="FP128"),
    "no type at all": Lie(datatype=""),
    "more than there is": Lie(shape=(5,)),
    "less than there is": Lie(shape=(3,)),
    "far more than there is": Lie(shape=(2**62,)),
    "a negative size": Lie(shape=(-4,)),
    "two negative sizes": Lie(shape=(-2, -2)),
    "another rank": Lie(shape=(2, 2)),
    "no dimensions": Lie(shape=()),
    "dimensions without end": Lie(shape=(1,) * 100),
    "another name": Lie(name="OUT9"),
    "no name": Lie(name=""),
    "too few bytes": Lie(content=bytes(15)),
    "no bytes": Lie(content=b""),
}
OF_JSON: Final = {
    "a size that is no number": Lie(shape=("4",)),
    "a fraction of a size": Lie(shape=(4.5,)),
    "no list of sizes": Lie(shape=4),
    "no sizes": Lie(shape=None),
    "a type that is no text": Lie(datatype=7),
    "a name that is no text": Lie(name=None),
}
IN_BAND_ALONE: Final = {"less than there is", "too few bytes", "no bytes"}
"""Of an output in shared memory, these are the truth, or a part of it."""


def lying_grpc(lie: Lie) -> Callable[[Any, Any], Any]:
    def respond(request: Any, outputs: Any) -> Any:
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        answer.outputs.add(name=lie.name, datatype=lie.datatype, shape=lie.shape)
        answer.raw_output_contents.append(lie.content)
        return answer

    return respond


def lying_http(lie: Lie) -> Callable[[FakeServer, Any], Any]:
    honest = fake_wires.http_wire

    def answer(server: FakeServer, message: Any) -> Any:
        truth = honest(server, message)
        if not message.path.endswith("/infer"):
            return truth
        size = {"binary_data_size": len(lie.content)}
        output = {"name": lie.name, "datatype": lie.datatype, "shape": lie.shape, "parameters": size}
        head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        return Answer(200, {b"Inference-Header-Content-Length": b"%d" % len(head)}, head + lie.content)

    return answer


@pytest.fixture
def server() -> FakeServer:
    server = FakeServer()
    server.configs["m"] = config("m")
    return server


def infer(client: ShmClient, path: Any) -> Any:
    return client.infer("m", {"IN0": X}, outputs={"OUT0": 16}, path=path)["OUT0"]


def told(patch: pytest.MonkeyPatch, lie: Lie) -> None:
    """Have the fake server tell a lie over both protocols."""
    patch.setattr(fake_wires, "grpc_response", lying_grpc(lie))
    patch.setitem(fake_wires.WIRES, "http", (HttpCodec, lying_http(lie)))


WAYS: Final = [
    *[(protocol, path, name) for protocol in ("grpc", "http") for path in ("triton-shm", "inline") for name in LIES],
    *[("http", path, name) for path in ("triton-shm", "inline") for name in OF_JSON],
]


@pytest.mark.parametrize(("protocol", "path", "name"), WAYS)
def test_a_lie_is_the_peers_error_and_the_next_call_is_right(
    server: FakeServer, protocol: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = {**LIES, **OF_JSON}[name]
    is_true_of_shared_memory = path == "triton-shm" and name in IN_BAND_ALONE
    with monkeypatch.context() as patch:
        told(patch, lie)
        with client_of(server, protocol) as client:
            if is_true_of_shared_memory:
                infer(client, path)
            else:
                with pytest.raises(PeerError):
                    infer(client, path)
    with client_of(server, protocol) as client:
        assert (infer(client, path) == 2 * X).all()


STRINGS: Final = {"text": ["x"], "numbers": [-1], "lists": [[1]]}
"""In place of the bytes of strings, what JSON has."""


@pytest.mark.parametrize("data", STRINGS.values(), ids=STRINGS)
@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_strings_that_come_as_json_are_the_peers_error(path: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fake_wires.http_wire

    def answer(server: FakeServer, message: Any) -> Any:
        if not message.path.endswith("/infer"):
            return honest(server, message)
        head = {"outputs": [{"name": "OUT0", "datatype": "BYTES", "shape": [1], "data": data}]}
        return Answer(200, {}, json.dumps(head).encode())

    monkeypatch.setitem(fake_wires.WIRES, "http", (HttpCodec, answer))
    server = FakeServer(config("m", dtype="TYPE_STRING"))
    with client_of(server, "http") as client, pytest.raises(PeerError, match="BYTES"):
        client.infer("m", {"IN0": np.array([b"x"], object)}, path=path)


def test_bytes_in_shared_memory_never_become_pointers() -> None:
    with pytest.raises(TypeError, match="holds pointers"):
        array_at(np.zeros(64, np.uint8), 0, np.dtype(object), (4,), 64)
