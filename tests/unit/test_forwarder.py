"""Which way a request to another model goes, and what a model keeps of those: configurations, and sizes of outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import pytest

from shm_backend_utils.errors import ForwardError, ModelError, TensorError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.model import DeviceArrays
from shm_backend_utils.model.forward import Forwarder, direct
from shm_backend_utils.model.forward.direct import DirectForwarding
from shm_backend_utils.model.forward.forwarder import ModelSpecs
from shm_backend_utils.model.forward.ordinary import OrdinaryForwarding, OtherModel
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import call_layout
from shm_backend_utils.protocol.spans import MAX_TENSORS
from shm_backend_utils.tensors.values import untyped_array
from tests.unit.answering_server import answering
from tests.unit.emulated import start_server


@pytest.fixture
def forwarder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forwarder]:
    monkeypatch.setattr(TritonBackend, "request", lambda *_: object())
    start_server(monkeypatch)
    made = Forwarder("caller", TritonBackend(), DeviceArrays(CudaAccess(), 0), "http://localhost:1")
    yield made
    made.close()


def spec_of(output_count: int) -> ModelSpec:
    described = {"data_type": "TYPE_FP32", "dims": [-1]}
    return ModelSpec.from_config(
        {
            "name": "called",
            "input": [{"name": "X", "optional": True, **described}],
            "output": [{"name": f"Y{index}", **described} for index in range(output_count)],
            "parameters": {"SHM_PATHS": {"string_value": "direct,inline"}},
        }
    )


@pytest.mark.parametrize(
    ("count", "kind"), [(1, DirectForwarding), (MAX_TENSORS, OrdinaryForwarding)], ids=["few tensors", "too many"]
)
def test_a_request_to_a_model(forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, count: int, kind: type) -> None:
    monkeypatch.setattr(forwarder._specs, "model", lambda model, version: OtherModel(spec_of(count)))
    forwarding = forwarder.begin("called", {"X": np.ones(3, np.float32)}, ["Y0"], {}, "", "", list)
    assert type(forwarding) is kind
    forwarding.give_up()


@pytest.mark.parametrize("outputs", [[], {}, iter(()), "Y0", 3, [1], {"Y0": -1}, {"Y0": "16"}, {"Y0": 1.5}])
def test_outputs_that_no_model_can_be_asked_for(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, outputs: Any
) -> None:
    monkeypatch.setattr(forwarder._specs, "model", lambda model, version: OtherModel(spec_of(1)))
    with pytest.raises(ModelError, match="model 'called' cannot be asked so: outputs (is|has) .*(expected|leave)"):
        forwarder.begin("called", {"X": np.ones(3, np.float32)}, outputs, {}, "", "", list)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([b"a\0", "\u00fc"], [b"a\0", "\u00fc"]),
        (np.array(["a"]), ["a"]),
        ([[1, 2]], [[1, 2]]),
        (np.array([1.5], ">f8"), [1.5]),
        (np.ma.MaskedArray([1]), [1]),
    ],
    ids=["bytes and text", "array of text", "numbers", "big-endian", "nothing masked"],
)
def test_a_value_for_a_model_of_which_nobody_tells_is_what_numpy_takes_it_for(value: Any, expected: list[Any]) -> None:
    array = untyped_array("X", value)
    assert (array.tolist(), type(array), array.dtype.isnative) == (expected, np.ndarray, True)


@pytest.mark.parametrize("value", [np.ma.MaskedArray([1], True), [[1], [2, 3]], [np.ma.MaskedArray([1], True), [2]]])
def test_a_value_for_a_model_of_which_nobody_tells_is_not_changed(value: Any) -> None:
    with pytest.raises(TensorError, match="tensor 'X' (has 1 masked elements|is a nested list that is not rect)"):
        untyped_array("X", value)


@pytest.mark.parametrize("hint", [16, np.int64(16), np.uint8(16)])
def test_room_for_an_output_may_be_an_integer_of_numpy(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, hint: int
) -> None:
    spec = spec_of(1)
    rooms: list[object] = []

    def looking(*given: Any, **named: Any) -> Any:
        rooms.append(given[2]["Y0"])
        return call_layout.lay_out(*given, **named)

    monkeypatch.setattr(direct, "lay_out", looking)
    monkeypatch.setattr(forwarder._specs, "model", lambda model, version: OtherModel(spec))
    forwarder.begin("called", {"X": np.ones(3, np.float32)}, {"Y0": hint}, {}, "", "", list).give_up()
    assert rooms == [16]


MANY: Final = 200


def config(name: str, dims: int = -1) -> dict[str, Any]:
    tensors = {"data_type": "TYPE_FP32", "dims": [dims]}
    return {"name": name, "input": [{"name": "X", **tensors}], "output": [{"name": "Y", **tensors}]}


class Server:
    """Tells configurations over HTTP, as Triton does."""

    def __init__(self) -> None:
        self.configs: dict[str, Any] = {}
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes]:
        place = path.removeprefix("/v2/models/").removesuffix("/config")
        self.asked.append(place)
        found = self.configs.get(place)
        return (400, b"{}") if found is None else (200, json.dumps(found).encode())


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with answering(server.answer) as server.url:
        yield server


@pytest.fixture
def specs(server: Server) -> ModelSpecs:
    return ModelSpecs(server.url)


def dims_of(specs: ModelSpecs, model: str, version: str = "") -> tuple[int, ...]:
    known = specs.model(model, version)
    assert known is not None
    return known.spec.outputs["Y"].shape


# Configurations


def test_a_model_is_asked_for_once(server: Server, specs: ModelSpecs) -> None:
    server.configs["a"] = config("a", 3)
    assert [dims_of(specs, "a") for _ in range(5)] == [(3,)] * 5
    assert server.asked == ["a"]


def test_models_and_versions_are_told_apart(server: Server, specs: ModelSpecs) -> None:
    server.configs = {"a": config("a", 1), "b": config("b", 2), "a/versions/7": config("a", 7)}
    assert [dims_of(specs, *each) for each in (("a", ""), ("b", ""), ("a", "7"), ("a", ""))] == [(1,), (2,), (7,), (1,)]


def test_a_model_that_has_changed_is_told_as_it_is_once_it_was_forgotten(server: Server, specs: ModelSpecs) -> None:
    server.configs = {"a": config("a", 1), "a/versions/1": config("a", 1), "b": config("b", 1)}
    for each in (("a", ""), ("a", "1"), ("b", "")):
        dims_of(specs, *each)
    server.configs = {"a": config("a", 2), "a/versions/1": config("a", 2), "b": config("b", 2)}
    specs.forget("a")
    assert [dims_of(specs, *each) for each in (("a", ""), ("a", "1"), ("b", ""))] == [(2,), (2,), (1,)]


def test_models_that_there_are_not_are_not_kept(server: Server, specs: ModelSpecs) -> None:
    for number in range(MANY):
        with pytest.raises(ModelError, match="no such model"):
            specs.model(f"nobody {number}", "")
    assert specs._known == {}
    server.configs["nobody%200"] = config("nobody 0", 4)  # now there is one of them
    assert dims_of(specs, "nobody 0") == (4,)


def test_that_a_server_does_not_tell_is_not_kept(server: Server) -> None:
    specs = ModelSpecs("http://127.0.0.1:9")
    assert [specs.model("a", "") for _ in range(3)] == [None] * 3
    assert specs._known == {}


# Sizes of outputs


class Answered:
    """A request to another model that was answered, or failed."""

    def __init__(self, model: str, overflowed: dict[str, int], batch_size: int | None, fails: bool = False) -> None:
        self.model = model
        self.overflowed = overflowed
        self.batch_size = batch_size
        self.fails = fails
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True

    def result(self, response: object) -> dict[str, Any]:
        if self.fails:
            raise ForwardError("it failed")
        return {}


@pytest.fixture
def idle_forwarder(server: Server) -> Iterator[Forwarder]:
    idle_forwarder = Forwarder("m", cast(Any, None), cast(Any, None), server.url)
    yield idle_forwarder
    idle_forwarder.close()


def finish(idle_forwarder: Forwarder, answered: Answered) -> None:
    idle_forwarder.finish(cast(Any, answered), None)


def test_one_number_is_kept_for_each_output_of_each_model(idle_forwarder: Forwarder) -> None:
    for number in range(MANY):
        for model in ("a", "b"):
            finish(idle_forwarder, Answered(model, {"Y": 8 * number, "Z": 8}, None))
    sizes = {"Y": 9 * (MANY - 1), "Z": 9}
    assert {model: learned.per_row for model, learned in idle_forwarder._learned.items()} == {"a": sizes, "b": sizes}


def test_the_largest_row_is_what_is_kept(idle_forwarder: Forwarder) -> None:
    for byte_size, rows in ((800, 8), (80, 1), (1600, 16)):
        finish(idle_forwarder, Answered("a", {"Y": byte_size}, rows))
    assert idle_forwarder._learned["a"].per_row == {"Y": 113}


def test_a_model_that_failed_is_asked_for_anew(server: Server, idle_forwarder: Forwarder) -> None:
    server.configs["a"] = config("a", 1)
    specs = idle_forwarder._specs
    dims_of(specs, "a")
    server.configs["a"] = config("a", 2)
    failing = Answered("a", {}, None, fails=True)
    with pytest.raises(ForwardError):
        finish(idle_forwarder, failing)
    assert failing.is_given_up
    assert dims_of(specs, "a") == (2,)
