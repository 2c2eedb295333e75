"""What Triton does to requests on their way, as docs/configuration.md tells it: the same on every path, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.doctor import examine
from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import CallerError, ModelError
from shm_backend_utils.testing.harness import ModelHarness
from tests.docs.documents import ROOT
from tests.releases import says_more

from .flavours import url_of
from .loading_server import LoadingServer, side_by_side

CODE: Final = """
import json

import numpy as np

from shm_backend_utils.model import ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.is_decoupled = json.loads(args["model_config"]).get("model_transaction_policy", {}).get("decoupled")

    def execute(self, requests):
        if not self.is_decoupled:
            return self.session.serve(requests, self.infer)
        self.session.serve_streams(requests, self.infer)
        for request in requests:
            request.set_release_flags(2)  # to be executed again, of which Triton takes no notice

    def infer(self, call):
        seen = {
            "inputs": {name: view.shape for name, view in call.inputs.items()},
            "absent": call.find_input("Z") is None,
            "controls": {name: call.input(name).numpy().tolist() for name in call.spec.controls},
            "sequence": call.sequence,
        }
        if "READY" in call.spec.controls and not call.sequence:
            print("UNEXPECTED", seen, flush=True)
        rows = call.batch_size if call.spec.max_batch_size else None
        text = np.frombuffer(json.dumps(seen).encode(), np.uint8)
        call.put("SEEN", text if rows is None else np.tile(text, (rows, 1)))
        x = call.input("X").numpy()
        np.multiply(x, 2, out=call.output("Y", x.shape, x.dtype).numpy())
        if "say" in call.parameters:
            call.response_parameters["said"] = call.parameters["say"]
        if self.is_decoupled:
            call.send()
            if "say" in call.parameters:
                call.put("Y", x)  # of another response
                call.send()

    def finalize(self):
        self.session.close()
"""
TENSORS: Final = """
backend: "python"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] optional: true {x} {both} }} ]
input [ {{ name: "Z" data_type: TYPE_FP32 dims: [ 1 ] optional: true }} ]
input [ {{ name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }} ]
output [ {{ name: "Y" data_type: TYPE_{dtype} dims: [ {dims} ] {both} }} ]
output [ {{ name: "SEEN" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
parameters {{ key: "SHM_PATHS" value: {{ string_value: "{paths}" }} }}
"""
CONTROLS: Final = """
control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]
control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
control_input [ { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] } ]
control_input [ { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } ] } ]
"""
ROWS: Final = re.findall(
    r"^\| (.+?) \| (.+) \|$",
    (ROOT / "docs/configuration.md").read_text().partition("## How Triton changes")[2].partition("\n## ")[0],
    re.MULTILINE,
)[1:]
PATHS: Final[tuple[PathName, ...]] = ("direct", "triton-shm", "inline")


class Served(NamedTuple):
    """Lines of a configuration, the shape that a request has, and what model.py sees of it; more is the request's."""

    lines: str
    shape: tuple[int, ...]
    seen: tuple[int, ...]
    tensors: Mapping[str, str] = {}
    more: Mapping[str, Any] = {}
    controls: Mapping[str, Any] = {}


class Refused(NamedTuple):
    """Lines of a configuration, and what is said of them at load."""

    lines: str
    said: str
    tensors: Mapping[str, str] = {}


ONE: Final = {"sequence_id": 7, "sequence_start": True}
SERVED: Final = {
    "way_batches": Served(
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 2 default_queue_policy { "
        "timeout_action: REJECT default_timeout_microseconds: 60000000 max_queue_size: 9 } } "
        'instance_group { kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } priority: 2 } } '
        'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value: { data_type: TYPE_FP32 dims: [ 5, 1, 4 ] '
        "zero_data: true } } }",
        (2, 5, 1, 4),
        (2, 5, 2, 2),
        {"dims": "-1, 1, 4", "x": "allow_ragged_batch: true", "both": "reshape { shape: [ -1, 2, 2 ] }"},
        {"priority": 1},
    ),
    "way_alone": Served("max_batch_size: 0", (2, 3), (6,), {"dims": "2, 3", "both": "reshape { shape: 6 }"}),
    "way_oldest": Served(
        f"sequence_batching {{ oldest {{ }} max_sequence_idle_microseconds: 60000000 {CONTROLS} }}",
        (3,),
        (3,),
        more={**ONE, "sequence_end": True},
        controls={"READY": [1], "START": [1.0], "END": [True], "ID": [7]},
    ),
    "way_slots": Served(
        f"max_batch_size: 8 sequence_batching {{ direct {{ }} {CONTROLS} }}",
        (1, 1),
        (1,),
        {"dims": "1", "both": "reshape { shape: [ ] }"},
        ONE,
        {"READY": [[1]], "START": [[1.0]], "END": [[False]], "ID": [[7]]},
    ),
    "way_streams": Served("max_batch_size: 8 model_transaction_policy { decoupled: true }", (2, 3), (2, 3)),
}
REFUSED: Final = (
    Refused("max_batch_size: 8", "a reshape of output 'Y'", {"dtype": "STRING", "both": "reshape { shape: -1 }"}),
    Refused("", "only supported for TensorRT platform", {"x": "is_shape_tensor: true"}),
    Refused("", "only supported for the TensorRT platform", {"x": "is_non_linear_format_io: true"}),
    Refused(
        'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" source_input: "X" data_type: TYPE_FP32 }',
        "batch_input [ … ]",
    ),
    Refused('batch_output { target_name: "Y" source_input: "X" }', "batch_output [ … ]"),
    Refused('model_warmup { name: "w" batch_size: 1 }', "model_warmup [ … ]", {"paths": "direct"}),
    Refused("response_cache { enable: true }", "response_cache { enable: true }"),
    Refused("sequence_batching { iterative_sequence: true }", "iterative_sequence: true"),
    Refused(
        "max_batch_size: 4 sequence_batching { oldest { } iterative_sequence: true } "
        "model_transaction_policy { decoupled: true }",
        "iterative_sequence: true",
    ),
    Refused(
        'sequence_batching { state { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: 1 } }', "state [ … ]"
    ),
)


def config_of(case: Served | Refused) -> str:
    tensors = {"dims": "-1", "x": "", "both": "", "dtype": "FP32", "paths": ",".join(PATHS), **case.tensors}
    return f"{TENSORS.format(**tensors)}\n{case.lines}\n"


def make_model(folder: Path, case: Served | Refused) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(CODE)
    (folder / "config.pbtxt").write_text(config_of(case))
    return folder


@pytest.fixture(scope="module")
def loaded(loading_server: LoadingServer) -> LoadingServer:
    for name, case in SERVED.items():
        make_model(loading_server.models / name, case)
    side_by_side(loading_server.grpc.load_model, SERVED)
    return loading_server


@pytest.fixture
def on_the_way(loaded: LoadingServer) -> Iterator[ShmClient]:
    with ShmClient(loaded.server.grpc_url, timeout_s=30, inline_bytes=0) as client:
        yield client


def check_case(client: ShmClient, model: str, case: Served, path: PathName) -> None:
    x = np.arange(np.prod(case.shape), dtype=np.float32).reshape(case.shape)
    is_decoupled = "decoupled" in case.lines
    if is_decoupled and path == "triton-shm":
        return  # which has room for one response
    if is_decoupled:
        (result,) = [frame.copy() for frame in client.stream(model, {"X": x}, path=path)]
    else:
        result = client.infer(model, {"X": x}, path=path, outputs={"Y": x.nbytes, "SEEN": 4096}, **case.more).copy()
    np.testing.assert_array_equal(result["Y"], x * 2)
    said = json.loads(result["SEEN"].reshape(-1, result["SEEN"].shape[-1])[0].tobytes())
    sequence = [case.more["sequence_id"], True, "sequence_end" in case.more] if "sequence_id" in case.more else None
    assert said == {
        "inputs": {"X": list(case.seen)},
        "absent": True,
        "controls": dict(case.controls),
        "sequence": sequence,
    }


@pytest.mark.parametrize(("row", "told"), ROWS)
def test_every_row_of_the_table_has_its_models(row: str, told: str) -> None:
    cases: list[Served | Refused] = [*SERVED.values(), *REFUSED]
    for line in re.findall(r"`(.+?)`", row):
        having = [case for case in cases if line.replace("`", "").partition(" {")[0] in config_of(case)]
        are_served = [isinstance(case, Served) for case in having]
        if "refused" in told:
            assert not all(are_served)
        if not told.startswith("refused"):
            assert any(are_served)


@pytest.mark.parametrize("name", SERVED)
def test_model_py_sees_the_same_on_every_path(on_the_way: ShmClient, name: str) -> None:
    for path in PATHS:
        check_case(on_the_way, name, SERVED[name], path)


@pytest.mark.parametrize("path", ["direct", "inline"])
def test_no_request_of_tritons_own_reaches_infer(loaded: LoadingServer, on_the_way: ShmClient, path: PathName) -> None:
    inputs = {"X": np.ones((1, 1), np.float32)}
    for number in (1, 2):
        on_the_way.infer("way_slots", inputs, path=path, sequence_id=number, sequence_start=True)
    for _ in range(3):  # with the other's slot empty
        assert on_the_way.infer("way_slots", inputs, path=path, sequence_id=2)["Y"] == 2
    for number in (1, 2):
        on_the_way.infer("way_slots", inputs, path=path, sequence_id=number, sequence_end=True)
    assert "UNEXPECTED" not in loaded.server.log_file.read_text(errors="replace")


def test_it_sees_that_in_the_harness(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, case) for name, case in SERVED.items()]
    with ModelHarness(*models) as harness, ShmClient(harness) as client:
        for name, case in SERVED.items():
            for path in PATHS:
                check_case(client, name, case, path)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.said)
def test_what_cannot_be_the_same_does_not_load(tmp_path: Path, case: Refused) -> None:
    with pytest.raises(ModelError, match=re.escape(case.said)):
        ModelHarness(make_model(tmp_path / "m", case))


def test_a_server_lives_on_that_does_not_load_it(loaded: LoadingServer) -> None:
    for case in REFUSED[6:9:2]:
        name = f"way_{case.said[:5]}"
        make_model(loaded.models / name, case)
        with pytest.raises(InferenceServerException, match=re.escape(case.said)):
            loaded.grpc.load_model(name)
        assert loaded.grpc.is_server_live()


def test_another_client_goes_on_with_a_sequence(loaded: LoadingServer, on_the_way: ShmClient) -> None:
    inputs = {"X": np.ones(3, np.float32)}
    on_the_way.infer("way_oldest", inputs, sequence_id=7, sequence_start=True)
    with ShmClient(loaded.server.grpc_url, timeout_s=5, inline_bytes=0) as other:  # the model has one slot
        assert other.explain("way_oldest").path == "direct"
        assert other.is_model_ready("way_oldest")  # as its process is seen
        assert other.infer("way_oldest", inputs, sequence_id=7, sequence_end=True).path == "direct"


def test_who_asks_how_a_model_of_sequences_is_gets_an_answer(loaded: LoadingServer, protocol: str) -> None:
    url = url_of(loaded.server, protocol)
    for name in ("way_slots", "way_oldest"):
        checkup = examine(url, name)
        assert any("has read a nonce in sealed memory" in line for _, line in checkup.fine)
        assert not any(finding.model == name and finding.trouble.is_fatal for finding in checkup.findings)
        with ShmClient(url, timeout_s=30) as client:
            assert client.is_model_ready(name)


@pytest.mark.until_triton("2.55", "newer ones send it")
def test_an_older_server_is_told_which_one_sends_it(on_the_way: ShmClient) -> None:
    with pytest.raises(InferenceError, match=r"response parameters need Triton 2\.55 \(25\.02\)") as error:
        on_the_way.infer("way_alone", {"X": np.ones((2, 3), np.float32)}, parameters={"say": "it"})
    assert error.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_sequence_has_no_place_for_split_calls(on_the_way: ShmClient, path: PathName) -> None:
    with pytest.raises(CallerError, match="model 'way_slots' takes sequences, one request after another; leave split"):
        on_the_way.infer("way_slots", {"X": np.ones((9, 1), np.float32)}, split=True, sequence_id=7, path=path)


RESHAPED: Final = Served(
    "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 5000 }",
    (2, 5, 1, 2),
    (2, 5, 2),
    {"dims": "-1, 1, 2", "both": "reshape { shape: [ -1, 2 ] }"},
)
MODES: Final = {
    "serve": """
    def execute(self, requests): return self.session.serve(requests, self.infer)
    def infer(self, call): call.put("Y", call.input("X").numpy().reshape(call.batch_size, -1, 2) + 1)""",
    "serve_batch": """
    def execute(self, requests): return self.session.serve_batch(requests, self.infer)
    def infer(self, call):
        x = call.input("X").numpy()
        np.add(x, 1, out=call.output("Y", x.shape[1:], x.dtype).numpy())""",
    "forward": """
    def execute(self, requests): return self.session.serve(requests, self.infer)
    def infer(self, call):
        x = call.input("X").numpy()
        y = call.forward("serve", {"X": x.reshape(len(x), -1, 1, 2)}, ["Y"])["Y"]
        call.put("Y", y.numpy().reshape(x.shape))""",
    "streams": """
    def execute(self, requests): self.session.serve_streams(requests, self.infer)
    def infer(self, call):
        for _ in range(3):
            call.put("Y", call.input("X").numpy() + 1)
            yield""",
}


@pytest.mark.parametrize("mode", MODES)
def test_a_reshaped_tensor_goes_every_way(tmp_path: Path, mode: str) -> None:
    folders = [make_model(tmp_path / name, RESHAPED) for name in dict.fromkeys([mode, "serve"])]
    for folder in folders:
        head, tail = CODE.partition("    def execute")[0], CODE.partition("    def finalize")
        (folder / "1/model.py").write_text(f"{head}{MODES[folder.name]}\n{''.join(tail[1:])}")
    if mode == "streams":
        with (folders[0] / "config.pbtxt").open("a") as config:
            config.write("model_transaction_policy { decoupled: true }\n")
    x = np.arange(20, dtype=np.float32).reshape(RESHAPED.shape)
    with ModelHarness(*folders) as harness, ShmClient(harness, inline_bytes=0) as client:
        for path in PATHS if mode != "streams" else PATHS[::2]:
            for room in ({"Y": x.nbytes}, {"Y": 4}) if path == "direct" else ({"Y": x.nbytes},):
                if mode == "streams":
                    results = [result["Y"].copy() for result in client.stream(mode, {"X": x}, path=path, outputs=room)]
                else:
                    submitted = [client.submit(mode, {"X": x}, path=path, outputs=room) for _ in range(3)]
                    results = [each.result()["Y"] for each in submitted]
                    with client.prepare(mode, {"X": (x.shape, x.dtype)}, path=path, outputs=room) as call:
                        call.inputs["X"][...] = x
                        results.append(call.infer()["Y"])
                for result in results:
                    np.testing.assert_array_equal(result, x + 1)


@pytest.fixture(params=["harness", pytest.param("grpc", marks=says_more), pytest.param("http", marks=says_more)])
def talking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShmClient]:
    if request.param == "harness":
        models = [make_model(tmp_path / name, SERVED[name]) for name in ("way_alone", "way_streams")]
        with ModelHarness(*models) as harness, ShmClient(harness, inline_bytes=0) as client:
            yield client
    else:
        server = request.getfixturevalue("loaded").server
        with ShmClient(url_of(server, request.param), timeout_s=30, inline_bytes=0) as client:
            yield client


def test_a_model_says_something_beside_its_outputs(talking: ShmClient) -> None:
    x = np.ones((2, 3), np.float32)
    for path in PATHS:
        for said in ("é", True, -(2**40)):
            result = talking.infer("way_alone", {"X": x}, path=path, parameters={"say": said})
            assert result.parameters == {"said": said}
        assert talking.infer("way_alone", {"X": x}, path=path).parameters == {}
        with pytest.raises(InferenceError, match=r"response parameter 'said' is 1\.5; expected a str"):
            talking.infer("way_alone", {"X": x}, path=path, parameters={"say": 1.5})
    for path in PATHS[::2] if "http" not in repr(talking) else ():
        results = talking.stream("way_streams", {"X": x}, path=path, parameters={"say": 1})
        assert [result.parameters for result in results] == [{"said": 1}, {}]
