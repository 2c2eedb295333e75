"""What auto_complete makes of a configuration, and what it has to say against one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.model import auto_complete
from shm_backend_utils.model_spec import ModelSpec

CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
X: dict[str, Any] = {"name": "X", "data_type": "TYPE_FP32", "dims": [3]}
LISTED = X | {"format": "FORMAT_NONE", "reshape": {"shape": [1, 3]}}  # config.pbtxt has it, and says more of it


class Config:
    """Triton's object, as far as it is used: the configuration can be read, and inputs added or completed."""

    def __init__(self, **described: Any) -> None:
        self._described: dict[str, Any] = {"name": "m", "max_batch_size": 0, "input": [], "parameters": {}} | described

    def as_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._described)  # it may be read, but not written

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        assert tensor.keys() <= {"name", "data_type", "dims", "optional"}
        for known in self._described["input"]:
            if known["name"] == tensor["name"]:
                if any(known.get(field, value) != value for field, value in tensor.items()):
                    raise ValueError("config.pbtxt says otherwise")
                known.update(tensor)
                return
        self._described["input"].append(dict(tensor))

    @property
    def inputs(self) -> list[dict[str, Any]]:
        inputs: list[dict[str, Any]] = self.as_dict()["input"]
        return inputs


def declares(paths: str) -> dict[str, Any]:
    return {"SHM_PATHS": {"string_value": paths}}


def test_triton_gets_its_own_object_back() -> None:
    config = Config(input=[X])
    assert auto_complete(config) is config


@pytest.mark.parametrize("max_batch_size", [0, 8])
@pytest.mark.parametrize("parameters", [{}, declares("direct"), declares("direct,triton-shm,inline")])
@pytest.mark.parametrize("inputs", [[], [X], [X, LISTED | {"name": "Z", "optional": True}, CARRIER]])
def test_the_model_can_serve_the_direct_path_afterwards(
    max_batch_size: int, parameters: dict[str, Any], inputs: list[dict[str, Any]]
) -> None:
    config = Config(max_batch_size=max_batch_size, parameters=parameters, input=copy.deepcopy(inputs))
    auto_complete(config)
    assert ModelSpec.from_config(config.as_dict()).obstacle_to_direct() is None


def test_every_input_becomes_optional_and_stays_what_it_is_otherwise() -> None:
    config = Config(input=[X, LISTED | {"name": "Z", "optional": True}])
    auto_complete(config)
    assert config.inputs == [X | {"optional": True}, LISTED | {"name": "Z", "optional": True}, CARRIER]


@pytest.mark.parametrize(
    ("described", "has_carrier"),
    [
        ({}, True),
        ({"max_batch_size": 8}, True),
        ({"max_batch_size": 8, "parameters": declares("direct")}, True),
        ({"parameters": declares("direct")}, False),
    ],
)
def test_the_carrier_is_added_where_there_are_batches_or_nothing_else_declares_the_path(
    described: dict[str, Any], has_carrier: bool
) -> None:
    config = Config(input=[X], **described)
    auto_complete(config)
    assert (CARRIER in config.inputs) == has_carrier


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_doing_it_twice_adds_nothing(max_batch_size: int) -> None:
    config = auto_complete(Config(input=[X], max_batch_size=max_batch_size))
    once = config.as_dict()
    assert auto_complete(config).as_dict() == once


@pytest.mark.parametrize("paths", ["inline", "triton-shm,inline"])
def test_a_model_that_is_to_serve_no_direct_path_is_left_as_it_is(paths: str) -> None:
    config = Config(max_batch_size=8, input=[X | {"optional": False}], parameters=declares(paths))
    before = config.as_dict()
    assert auto_complete(config).as_dict() == before


def test_a_listed_input_that_is_not_optional_is_named_with_the_line_to_add() -> None:
    with pytest.raises(ModelError, match="input 'X' of model 'm' is not optional") as caught:
        auto_complete(Config(input=[LISTED | {"optional": False}]))
    assert "add `optional: true` to it in config.pbtxt, or remove it there" in str(caught.value)


@pytest.mark.parametrize("max_batch_size", [0, 8])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"data_type": "TYPE_FP32"}, "TYPE_FP32 [-1], optional"),
        ({"dims": [4]}, "TYPE_UINT8 [4], optional"),
        ({"optional": False}, "TYPE_UINT8 [-1], not optional"),
    ],
)
def test_an_input_that_only_has_the_carriers_name_is_named_with_the_line_to_write(
    max_batch_size: int, change: dict[str, Any], found: str
) -> None:
    with pytest.raises(ModelError, match="input 'SHM' of model 'm' is ") as caught:
        auto_complete(Config(max_batch_size=max_batch_size, input=[CARRIER | change]))
    message = str(caught.value)
    assert f"is {found}, but" in message
    assert 'write { name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true } in config.pbtxt' in message


def test_an_input_of_the_carriers_name_may_stay_where_no_carrier_is_needed() -> None:
    own = {"name": "SHM", "data_type": "TYPE_FP32", "dims": [3], "optional": True}
    assert auto_complete(Config(input=[own], parameters=declares("direct"))).inputs == [own]


def test_paths_that_mean_nothing_are_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="SHM_PATHS of model 'm' is shm; expected some of"):
        auto_complete(Config(input=[X], parameters=declares("shm")))
