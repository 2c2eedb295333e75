"""What a request to a model of which nobody tells carries, and the configurations of others that a model keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.errors import ForwardError, ModelError, TensorError
from shm_backend_utils.model.forward.forwarder import Forwarder, ModelSpecs
from shm_backend_utils.tensors.values import untyped_array
from tests.unit.answering_server import answering


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


def test_each_model_and_version_is_asked_for_once(server: Server, specs: ModelSpecs) -> None:
    server.configs = {"a": config("a", 1), "b": config("b", 2), "a/versions/7": config("a", 7)}
    for _ in range(2):
        assert [dims_of(specs, *each) for each in (("a", ""), ("b", ""), ("a", "7"))] == [(1,), (2,), (7,)]
    assert server.asked == ["a", "b", "a/versions/7"]


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


def test_a_model_that_failed_is_asked_for_anew(server: Server) -> None:
    given_up: list[bool] = []

    def fail(_: object) -> None:
        raise ForwardError("it failed")

    failing: Any = SimpleNamespace(model="a", result=fail, give_up=lambda: given_up.append(True))
    nothing: Any = None
    with contextlib.closing(Forwarder("m", nothing, nothing, server.url)) as forwarder:
        server.configs["a"] = config("a", 1)
        dims_of(forwarder._specs, "a")
        server.configs["a"] = config("a", 2)
        with pytest.raises(ForwardError):
            forwarder.finish(failing, None)
        assert given_up == [True]
        assert dims_of(forwarder._specs, "a") == (2,)
