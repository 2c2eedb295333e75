"""A client for registered models is tritonclient's client, too; and its models may come, change and go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferenceServerClientPlugin

from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.server import EmbeddedServer

from .loading_server import MODELS, LoadingServer
from .two_classes import FACTS, ROWS, Declared, x_of

RUNNING_SUM = Declared("running_sum", [("X", (), np.float32)], [("SUM", (), np.float32)], 1, pool_size=4)


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[TritonSHMClient]:
    with TritonSHMClient(triton_server.grpc_url) as client:
        yield client


def facts_of(results: dict[str, npt.NDArray[Any]]) -> Any:
    return json.loads(results["FACTS"].tobytes().rstrip(b"\0"))


def test_it_is_tritonclients_client(client: TritonSHMClient) -> None:
    assert isinstance(client, tritonclient.grpc.InferenceServerClient)
    assert client.is_server_live()
    assert client.is_model_ready("rows")
    tensor = tritonclient.grpc.InferInput("X", [2, 4], "FP32")
    tensor.set_data_from_numpy(x_of(2))
    np.testing.assert_array_equal(client.infer("rows", [tensor]).as_numpy("DOUBLED"), x_of(2) * 2)


def test_the_channel_is_made_as_one_likes_and_a_verbose_client_prints_its_calls(
    triton_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    channel_args = [("grpc.max_send_message_length", -1)]
    with TritonSHMClient(triton_server.grpc_url, channel_args=channel_args, verbose=True) as client:
        ROWS.register(client)
        client.infer_shm("rows", {"X": x_of(9)})
    assert "infer_shm, model rows, {'DOUBLED': (9, 4)}" in capsys.readouterr().out


def test_the_options_reach_the_model(client: TritonSHMClient) -> None:
    FACTS.register(client)
    facts = facts_of(
        client.infer_shm(
            "call_facts", {"X": [0]}, request_id="seven", sequence_id=7, sequence_start=True, timeout=60_000_000
        )
    )
    assert facts["request_id"] == "seven"
    assert facts["sequence"] == [7, True, False]


class Word(InferenceServerClientPlugin):  # type: ignore[misc]
    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = 7  # nobody can send that


def test_a_plugin_adds_its_headers(client: TritonSHMClient) -> None:
    ROWS.register(client)
    client.register_plugin(Word())
    with pytest.raises(TypeError, match="Expected str, not <class 'int'>"):
        client.infer_shm("rows", {"X": x_of(1)})
    client.unregister_plugin()
    assert client.infer_shm("rows", {"X": x_of(1)})


class SlowNumber:
    """A number that takes long to read, so that what comes behind it would overtake it."""

    shape = ()

    def __float__(self) -> float:
        time.sleep(0.2)
        return 1.0


def test_the_rows_of_a_sequence_are_sent_in_order(client: TritonSHMClient) -> None:
    RUNNING_SUM.register(client)
    client.infer_shm("running_sum", {"X": [0]}, sequence_id=71, sequence_start=True)
    sums = client.infer_shm("running_sum", {"X": [SlowNumber(), *range(2, 50)]}, sequence_id=71)["SUM"]
    client.infer_shm("running_sum", {"X": [0]}, sequence_id=71, sequence_end=True)
    np.testing.assert_array_equal(sums, np.cumsum(np.arange(1, 50)))


def config_of(model: str) -> str:
    return (MODELS / model / "config.pbtxt").read_text()


def test_a_model_may_be_registered_before_it_is_loaded(loading_server: LoadingServer) -> None:
    with TritonSHMClient(loading_server.server.grpc_url) as client:
        declared = ROWS.but(model="rows_to_come")
        declared.register(client)
        with pytest.raises(InferShmError, match="unknown model"):
            client.infer_shm("rows_to_come", {"X": x_of(9)})
        loading_server.load("rows_to_come", "rows", config_of("rows"))
        for count in (1, 9):  # the first makes memory for one row, which is too little for the next
            results = client.infer_shm("rows_to_come", {"X": x_of(count)})
            np.testing.assert_array_equal(results["DOUBLED"], x_of(count) * 2)
        loading_server.load_anew("rows_to_come")
        assert client.infer_shm("rows_to_come", {"X": x_of(9)})
        loading_server.grpc.unload_model("rows_to_come")
        with pytest.raises(InferShmError):
            client.infer_shm("rows_to_come", {"X": x_of(9)})
