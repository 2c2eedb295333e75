"""What a server does with requests and models, right and wrong. The same of a harness and of a real server."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.releases import asks_models_whether_they_are_ready, frees_safely, knows_its_models, refuses_an_output_twice
from tests.unit.harness.wires import Tensor, Wire, request

CONFIGS = Path(__file__).with_name("completed")
X = {"X": Tensor.of([1, 2])}
UNKNOWN = "[request id: <id_unknown>] "
FAILED = "Failed to process the request(s) for model 'behaving_0', message: "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
MISCOUNTED = (
    f"{FAILED}Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
    "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:"
)
EXPLAINED = {
    "raise": f"{FAILED}ValueError: broken\n\nAt:\n",
    "raise nothing of ours": f"{FAILED}SystemExit: 3\n\nAt:\n",
    "few": f"{MISCOUNTED}0\n",
    "many": f"{MISCOUNTED}2\n",
    "tuple": FAILED + "Expected a list in the execute return, found type '<class 'tuple'>'.",
    "str": FAILED
    + "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
    "error": "my error",
}
INVALID: dict[str, tuple[Any, str]] = {
    "unknown output": (request("behaving", X, ["Q"]), "unexpected inference output 'Q' for model 'behaving'"),
    "no inputs": (
        request("behaving", {}),
        UNKNOWN + "expected number of inputs between 1 and 2 but got 0 inputs for model 'behaving'. Got input(s) [], "
        "but missing required input(s) ['X']. Please provide all required input(s).",
    ),
    "unknown input": (request("behaving", {**X, "Q": X["X"]}), "unexpected inference input 'Q' for model 'behaving'"),
    "dtype": (
        request("behaving", {"X": Tensor("INT32", [2], bytes(8))}, id="abc"),
        "[request id: abc] inference input 'X' data-type is 'INT32', but model 'behaving' expects 'FP32'",
    ),
    "rank": (
        request("behaving", {"X": Tensor.of([[1], [2]])}),
        UNKNOWN + "unexpected shape for input 'X' for model 'behaving'. Expected [-1], got [2,1]. ",
    ),
    "bytes": (
        request("behaving", {"X": Tensor("FP32", [3], bytes(8))}),
        UNKNOWN + "input byte size mismatch for input 'X' for model 'behaving'. Expected 12, got 8",
    ),
    "size -1": (
        request("behaving", {"X": Tensor("FP32", [-1], bytes(8))}),
        UNKNOWN + "All input dimensions should be specified for input 'X' for model 'behaving', got [-1]",
    ),
    "many strings": (
        request("behaving", {**X, "S": Tensor("BYTES", [2], bytes(12))}),
        UNKNOWN + "unexpected number of string elements 3 for inference input 'S' for model 'behaving', expecting 2",
    ),
    "no length": (
        request("behaving", {**X, "S": Tensor("BYTES", [2], bytes(5))}),
        UNKNOWN + "incomplete string length indicator for inference input 'S' for model 'behaving', expecting 4 bytes "
        "but only 1 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    "reserved": (
        request("behaving", X, parameters={"triton_x": 1}),
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
        "'triton_' are allowed: triton_enable_empty_final_response",
    ),
    "timeout": (
        request("behaving", X, parameters={"timeout": "x"}),
        "invalid value type for 'timeout' parameter, expected int64_param.",
    ),
    "row": (
        request("behaving_rows", {"X": Tensor.of(np.zeros((1, 3)))}),
        UNKNOWN + f"unexpected shape for input 'X' for model 'behaving_rows'. Expected [-1,2], got [1,3]. {NOTE}",
    ),
    "scalar": (
        request("behaving_rows", {"X": Tensor.of(0)}),
        UNKNOWN + "input 'X' has no shape but model requires batch dimension for 'behaving_rows'",
    ),
    "cut string": (
        request("behaving", {**X, "S": Tensor("BYTES", [2], bytes(4) + struct.pack("<I2s", 3, b"ab"))}),
        "incomplete string data for inference input 'S', expecting string of length 3 but only 2 bytes available",
    ),
    "bad version": (
        request("behaving", X, model_version="x"),
        "failed to get model version from specified version string 'x' (details: stol), version should be an integral "
        "value > 0",
    ),
    "priority": (
        request("behaving", X, parameters={"priority": -1}),
        "invalid value for 'priority', expected value >= 0.",
    ),
    "batch size": (
        request("behaving_rows", {"X": Tensor.of(np.zeros((5, 2)))}),
        UNKNOWN + "inference request batch-size must be <= 4 for 'behaving_rows'",
    ),
    "two batch sizes": (
        request("behaving_rows", {"X": Tensor.of(np.zeros((1, 2))), "SHM": Tensor("UINT8", [2, 0], b"")}),
        "batch size does not match other inputs for 'behaving_rows'",
    ),
}
REFUSED: dict[str, tuple[Any, str, str]] = {
    **{what: (message, "INVALID_ARGUMENT", text) for what, (message, text) in INVALID.items()},
    "no model": (request("nosuch", X), "NOT_FOUND", "Request for unknown model: 'nosuch' is not found"),
    "no version": (
        request("behaving", X, model_version="7"),
        "NOT_FOUND",
        "Request for unknown model: 'behaving' version 7 is not found",
    ),
    "decoupled": (
        request("behaving_stream", X),
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    ),
}
RAISED = FAILED.replace("behaving", "behaving_stream") + "ValueError: broken"
STREAMED: dict[str, list[tuple[str, list[str]]]] = {
    "": [("", ["Y"]), ("", ["Y"])],
    "nothing": [],
    "unknown": [("", [])],
    "raise": [(RAISED, [])],
    "one, then raise": [("", ["Y"]), (RAISED, [])],
    "return": [("is using the decoupled mode and the execute function must return None.", [])],
    "error": [("e1", [])],
}


class Contract:
    """Tests for whoever has a fixture ``wire``: a server or a harness with the models of ``tests/upstream_models``."""

    @pytest.mark.parametrize("what", REFUSED)
    def test_the_server_refuses(self, wire: Wire, what: str) -> None:
        message, status, text = REFUSED[what]
        answer = wire.send("ModelInfer", message)
        assert (answer.status, answer.text) == (status, text) or (answer.status == status and text in answer.text)
        assert len(answer.text) - len(text) < 60

    @pytest.mark.parametrize("do", EXPLAINED)
    def test_a_model_that_fails_fails_its_requests(self, wire: Wire, do: str) -> None:
        answer = wire.send("ModelInfer", request("behaving", X, parameters={"do": do}))
        assert answer.status == "INTERNAL"
        expected, found = EXPLAINED[do], answer.text
        if "At:" in expected:  # the server's copy of the model lies elsewhere
            assert found.startswith(expected)
            assert re.search(r"\n\nAt:\n  /\S+/behaving/1/model\.py\(\d+\): execute\n$", found)
        else:
            assert found == expected
        assert wire.send("ModelInfer", request("behaving", X)).status == "OK"

    @pytest.mark.parametrize(
        ("do", "outputs"),
        [
            ("", [("Y", "FP32", [2])]),
            ("dtype", [("Y", "INT64", [2])]),  # the server does not look at what a model answers
            ("shape", [("Y", "FP32", [2, 3])]),
            ("unknown", []),
            ("other names", [("Y", "FP32", [2])]),
            ("no outputs", []),
        ],
    )
    def test_what_a_model_answers_is_pruned_and_not_checked(self, wire: Wire, do: str, outputs: list[Any]) -> None:
        answer = wire.send("ModelInfer", request("behaving", X, parameters={"do": do}))
        assert [(each.name, each.datatype, list(each.shape)) for each in answer.message.outputs] == outputs

    def test_a_model_sees_the_parameters_that_are_not_the_servers(self, wire: Wire) -> None:
        others: dict[str, Any] = {"n": 1, "b": True, "s": "t", "headers": "h", "do": "parameters"}
        said = {"timeout": 77, "priority": 3, "sequence_id": 5, "sequence_start": True, **others}
        said["triton_enable_empty_final_response"] = True
        answer = wire.send("ModelInfer", request("behaving", X, ["Y"], said))
        assert json.loads(answer.text) == others

    @pytest.mark.parametrize("do", [pytest.param(do, marks=[frees_safely] * (do == "unknown")) for do in STREAMED])
    def test_a_decoupled_model_answers_as_often_as_it_likes_or_fails(self, wire: Wire, do: str) -> None:
        told = wire.stream(request("behaving_stream", X, parameters={"do": do}))
        assert [names for _, names, _ in told] == [names for _, names in STREAMED[do]]
        for (text, _, is_final), (expected, _) in zip(told, STREAMED[do], strict=True):
            assert expected in text if expected else (text, is_final) == ("", False)

    def test_the_end_of_a_stream_is_told_on_demand(self, wire: Wire) -> None:
        told = wire.stream(request("behaving_stream", X, parameters={"triton_enable_empty_final_response": True}))
        assert told[-1] == ("", [], True)

    def test_repeat(self, wire: Wire) -> None:
        values = np.array([4, 2, 0, 1], np.int32)
        told = wire.stream(request("repeat_stock", {"IN": Tensor("INT32", [4], values.tobytes())}))
        assert [sorted(names) for _, names, _ in told] == [["IDX", "OUT"]] * 4

    @asks_models_whether_they_are_ready
    @pytest.mark.parametrize(
        ("mood", "is_ready"),
        [("unready", False), ("broken", False), ("wordy", False), ("later", True), ("ready", True)],
    )
    def test_a_model_says_itself_whether_it_is_ready(self, wire: Wire, mood: str, is_ready: bool) -> None:
        for each, expected in ((mood, is_ready), ("ready", True)):
            assert wire.send("ModelInfer", request("moody", X, parameters={"mood": each})).status == "OK"
            told = wire.send("ModelReady", service_pb2.ModelReadyRequest(name="moody"))
            assert (told.status, told.message.ready) == ("OK", expected)
            assert wire.send("ServerReady", service_pb2.ServerReadyRequest()).message.ready is expected

    @refuses_an_output_twice
    def test_an_output_is_named_once(self, wire: Wire) -> None:
        answer = wire.send("ModelInfer", request("behaving", X, ["Y", "Y"]))
        text = UNKNOWN + "output 'Y' already exists in request"
        assert (answer.status, answer.text) == ("INVALID_ARGUMENT", text)

    @knows_its_models
    def test_a_model_that_is_not_there_is_not_found(self, wire: Wire) -> None:
        for name, version, text in (
            ("nosuch", "", "Request for unknown model: 'nosuch' is not found"),
            ("behaving", "7", "Request for unknown model: 'behaving' version 7 is not found"),
        ):
            told = wire.send("ModelReady", service_pb2.ModelReadyRequest(name=name, version=version))
            assert (told.status, told.text) == ("NOT_FOUND", text)

    @pytest.mark.parametrize("model", ["behaving", "behaving_rows", "behaving_stream", "auto_complete_stock"])
    def test_configurations_are_completed(self, wire: Wire, model: str) -> None:
        config = wire.send("ModelConfig", service_pb2.ModelConfigRequest(name=model)).message.config
        assert text_format.Parse((CONFIGS / f"{model}.pbtxt").read_text(), ModelConfig()) == config

    def test_initialize_gets_what_the_server_knows(self, wire: Wire) -> None:
        answer = wire.send("ModelInfer", request("behaving", X, parameters={"do": "args"}))
        args = json.loads(answer.text)
        assert args.pop("model_repository").endswith("/behaving")
        assert json.loads(args.pop("model_config")) == json.loads((CONFIGS / "behaving.json").read_text())
        assert args == {
            "model_instance_kind": "CPU",
            "model_instance_name": "behaving_0",
            "model_instance_device_id": "0",
            "model_version": "1",
            "model_name": "behaving",
        }

    @pytest.mark.parametrize("model", ["behaving_rows", "repeat_stock"])
    def test_metadata(self, wire: Wire, model: str) -> None:
        told = wire.send("ModelMetadata", service_pb2.ModelMetadataRequest(name=model)).message
        batch = [-1] if model == "behaving_rows" else []
        assert (told.name, list(told.versions), told.platform) == (model, ["1"], "python")
        assert [list(each.shape)[: len(batch)] for each in told.inputs] == [batch] * len(told.inputs)
        assert [each.name for each in told.inputs] == {"behaving_rows": ["X", "SHM"], "repeat_stock": ["IN"]}[model]
