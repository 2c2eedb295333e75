"""What a model keeps of the models that it calls: their configurations, and how large their outputs got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, cast

import pytest

from shm_backend_utils.errors import ForwardError, ModelError
from shm_backend_utils.model.forward import Forwarder
from shm_backend_utils.model.forward.model_specs import ModelSpecs
from tests.unit.answering_server import answering

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
    spec = specs.spec(model, version)
    assert spec is not None
    return spec.outputs["Y"].shape


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
            specs.spec(f"nobody {number}", "")
    assert specs._specs == {}
    server.configs["nobody%200"] = config("nobody 0", 4)  # now there is one of them
    assert dims_of(specs, "nobody 0") == (4,)


def test_that_a_server_does_not_tell_is_not_kept(server: Server) -> None:
    specs = ModelSpecs("http://127.0.0.1:9")
    assert [specs.spec("a", "") for _ in range(3)] == [None] * 3
    assert specs._specs == {}


# Sizes of outputs


class Answered:
    """A request to another model that was answered, or failed."""

    def __init__(self, model: str, overflowed: dict[str, int], batch_size: int | None, fails: bool = False) -> None:
        self.model = model
        self.overflowed = overflowed
        self.batch_size = batch_size
        self.fails = fails

    def result(self, response: object) -> dict[str, Any]:
        if self.fails:
            raise ForwardError("it failed")
        return {}


@pytest.fixture
def forwarder(server: Server) -> Iterator[Forwarder]:
    forwarder = Forwarder("m", cast(Any, None), cast(Any, None), server.url)
    yield forwarder
    forwarder.close()


def finish(forwarder: Forwarder, answered: Answered) -> None:
    forwarder.finish(cast(Any, answered), None)


def test_one_number_is_kept_for_each_output_of_each_model(forwarder: Forwarder) -> None:
    for number in range(MANY):
        for model in ("a", "b"):
            finish(forwarder, Answered(model, {"Y": 8 * number, "Z": 8}, None))
    assert forwarder._learned.keys() == {("a", "Y"), ("a", "Z"), ("b", "Y"), ("b", "Z")}
    assert forwarder._learned["a", "Y"] == 9 * (MANY - 1)


def test_the_largest_row_is_what_is_kept(forwarder: Forwarder) -> None:
    for byte_size, rows in ((800, 8), (80, 1), (1600, 16)):
        finish(forwarder, Answered("a", {"Y": byte_size}, rows))
    assert forwarder._learned == {("a", "Y"): 112}


def test_a_model_that_failed_is_asked_for_anew(server: Server, forwarder: Forwarder) -> None:
    server.configs["a"] = config("a", 1)
    specs = forwarder._specs
    dims_of(specs, "a")
    server.configs["a"] = config("a", 2)
    with pytest.raises(ForwardError):
        finish(forwarder, Answered("a", {}, None, fails=True))
    assert dims_of(specs, "a") == (2,)
