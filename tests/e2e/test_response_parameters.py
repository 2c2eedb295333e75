"""What a model says beside its outputs: on every path, in each response of a stream, where the server has such."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.testing.harness import ModelHarness
from tests.releases import says_more

from .flavours import url_of
from .loading_server import LoadingServer

CONFIG: Final = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }
"""
DECOUPLED: Final = f"{CONFIG}model_transaction_policy {{ decoupled: true }}\n"
CODE: Final = """
from shm_backend_utils.model import ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.serve = self.session.serve if "alone" in args["model_name"] else self.session.serve_streams

    def execute(self, requests):
        return self.serve(requests, self.infer if self.serve == self.session.serve else self.answer)

    def infer(self, call):
        call.response_parameters.update(call.parameters or {"text": "é", "flag": True, "count": -(2**40)})
        call.put("Y", call.input("X"))

    def answer(self, call):
        for number in range(3):
            if number != 1:
                call.response_parameters["number"] = number
            call.put("Y", call.input("X"))
            yield

    def finalize(self):
        self.session.close()
"""
X: Final = {"X": np.ones(2, np.float32)}


def make_models(folder: Path) -> list[Path]:
    models = [folder / "said_alone", folder / "said_in_streams"]
    for model, config in zip(models, (CONFIG, DECOUPLED), strict=True):
        (model / "1").mkdir(parents=True)
        (model / "1/model.py").write_text(CODE)
        (model / "config.pbtxt").write_text(config)
    return models


@pytest.fixture(scope="module")
def loaded(loading_server: LoadingServer) -> LoadingServer:
    for model in make_models(loading_server.models):
        loading_server.grpc.load_model(model.name)
    return loading_server


@pytest.fixture(params=["harness", pytest.param("grpc", marks=says_more), pytest.param("http", marks=says_more)])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShmClient]:
    if request.param == "harness":
        with ModelHarness(*make_models(tmp_path)) as harness, ShmClient(harness, inline_bytes=0) as client:
            yield client
    else:
        server = request.getfixturevalue("loaded").server
        with ShmClient(url_of(server, request.param), timeout_s=30, inline_bytes=0) as client:
            yield client


def test_they_come_on_every_path(client: ShmClient) -> None:
    for path in ("direct", "triton-shm", "inline"):
        result = client.infer("said_alone", X, path=path)
        assert result.parameters == {"text": "é", "flag": True, "count": -(2**40)}
        assert client.infer("said_alone", X, path=path, parameters={"a": "b"}).parameters == {"a": "b"}


def test_they_are_of_one_response_of_a_stream(client: ShmClient) -> None:
    if "http" not in repr(client):
        for path in ("direct", "inline"):
            said = [result.parameters for result in client.stream("said_in_streams", X, path=path)]
            assert said == [{"number": 0}, {}, {"number": 2}]


def test_what_cannot_be_sent_is_the_models_error(client: ShmClient) -> None:
    for path in ("direct", "inline"):
        with pytest.raises(InferenceError, match=r"response parameter 'a' is 1\.5; expected a str, a bool, or an int"):
            client.infer("said_alone", X, path=path, parameters={"a": 1.5})


def test_an_older_server_is_told_which_one_has_them(loaded: LoadingServer) -> None:
    major, minor, *_ = loaded.grpc.get_server_metadata().version.split(".")
    if (int(major), int(minor)) >= (2, 55):
        pytest.skip("this server has response parameters")
    with ShmClient(loaded.server.grpc_url, timeout_s=30, inline_bytes=0) as client:
        for path in ("direct", "inline"):
            with pytest.raises(InferenceError, match=r"responses have parameters from Triton 2\.55 \(25\.02\) on"):
                client.infer("said_alone", X, path=path)
