"""What a model's configuration has against the direct path: each thing is broken, and found with what it is about."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shm_backend_utils.cli.doctor.config_checks import findings_in_config, mentions_shared_memory
from shm_backend_utils.cli.doctor.troubles import ConfigTrouble, Trouble
from shm_backend_utils.model.config import PARAMETERS

FINE: dict[str, Any] = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 8,
    "input": [
        {"name": "X", "data_type": "TYPE_FP32", "dims": ["-1"], "optional": True},
        {"name": "W", "data_type": "TYPE_FP32", "dims": ["-1"], "optional": True},
        {"name": "SHM", "data_type": "TYPE_UINT8", "dims": ["-1"], "optional": True},
    ],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
}


def config_with(**parameters: str) -> dict[str, Any]:
    config = copy.deepcopy(FINE)
    config["parameters"] |= {name: {"string_value": value} for name, value in parameters.items()}
    return config


def config_without_optional(*names: str) -> dict[str, Any]:
    config = copy.deepcopy(FINE)
    for tensor in config["input"]:
        if tensor["name"] in names:
            del tensor["optional"]
    return config


def found_in(config: dict[str, Any]) -> list[tuple[Trouble, str]]:
    findings = findings_in_config(config, "m")
    assert {finding.model for finding in findings} <= {"m"}
    return [(finding.trouble, finding.found) for finding in findings]


def test_nothing_is_wrong_with_what_the_readme_shows() -> None:
    assert found_in(FINE) == []


def test_what_is_set_to_nothing_in_particular_is_fine() -> None:
    """As the server's own answer has every field."""
    told = {"platform": "", "response_cache": {"enable": False}, "model_transaction_policy": {"decoupled": True}}
    assert found_in({**FINE, **told}) == []


def test_all_inputs_that_are_not_optional_are_named() -> None:
    assert found_in(config_without_optional("X", "W")) == [(ConfigTrouble.INPUTS_NOT_OPTIONAL, "X, W are not optional")]
    assert found_in(config_without_optional("W")) == [(ConfigTrouble.INPUTS_NOT_OPTIONAL, "W is not optional")]


def test_no_input_for_the_batch_size() -> None:
    config = {**FINE, "input": FINE["input"][:2]}
    assert found_in(config) == [(ConfigTrouble.NO_SHM_INPUT, "max_batch_size is 8, and there is no input SHM")]
    assert found_in({**config, "max_batch_size": 0}) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [({"data_type": "TYPE_FP32"}, "TYPE_FP32, optional"), ({"optional": False}, "TYPE_UINT8, not optional")],
)
def test_an_input_of_its_name_that_is_another(change: dict[str, Any], found: str) -> None:
    config = {**FINE, "input": [FINE["input"][0], {**FINE["input"][2], **change}]}
    said = f"max_batch_size is 8, and the input SHM is {found}; expected TYPE_UINT8, optional"
    assert found_in(config) == [(ConfigTrouble.NO_SHM_INPUT, said)]


def test_no_parameter_of_paths() -> None:
    config = {**FINE, "max_batch_size": 0, "input": FINE["input"][:2], "parameters": {}}
    assert found_in(config) == [(ConfigTrouble.NO_SHM_PATHS, "found no parameter SHM_PATHS")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "driect,inline",
            "SHM_PATHS has 'driect' (did you mean 'direct'?); expected some of direct, inline, triton-shm",
        ),
        ("zzz , 12345", "SHM_PATHS has '12345', 'zzz'; expected "),
        (" , ", "SHM_PATHS is empty; expected some of "),
    ],
)
def test_words_that_are_no_paths(value: str, said: str) -> None:
    ((trouble, found), *rest) = [
        each for each in found_in(config_with(SHM_PATHS=value)) if each[0] is ConfigTrouble.UNKNOWN_PATH
    ]
    assert trouble is ConfigTrouble.UNKNOWN_PATH
    assert found.startswith(said)
    assert rest == []


def test_a_model_that_leaves_out_the_direct_path_is_told_no_more() -> None:
    config = config_without_optional("X")
    config["parameters"]["SHM_PATHS"]["string_value"] = "triton-shm,inline"
    said = "found SHM_PATHS 'inline,triton-shm'; expected direct among its words"
    assert found_in(config) == [(ConfigTrouble.DIRECT_NOT_DECLARED, said)]
    assert not ConfigTrouble.DIRECT_NOT_DECLARED.is_fatal


def test_every_unknown_parameter_is_told_with_what_was_meant() -> None:
    found = found_in(config_with(SHM_DEBG="true", shm_metrics="true", OTHER="x"))
    assert [trouble for trouble, _ in found] == [ConfigTrouble.UNKNOWN_PARAMETER, ConfigTrouble.UNKNOWN_PARAMETER]
    assert found[0][1].endswith("did you mean SHM_DEBUG?")
    assert found[1][1].endswith("did you mean SHM_METRICS?")


@pytest.mark.parametrize("name", sorted(PARAMETERS - {"SHM_PATHS"}))
def test_a_value_that_means_nothing(name: str) -> None:
    ((trouble, found),) = found_in(config_with(**{name: "nonsense"}))
    assert trouble is ConfigTrouble.BAD_PARAMETER
    assert found.startswith(f"parameter {name} is 'nonsense'; expected ")


def test_the_response_cache() -> None:
    ((trouble, found),) = found_in({**FINE, "response_cache": {"enable": True}})
    assert trouble is ConfigTrouble.RESPONSE_CACHE
    assert found.startswith("found response_cache { enable: true }; it looks at input tensors only")


def test_a_line_that_no_session_can_serve() -> None:
    ((trouble, found),) = found_in({**FINE, "sequence_batching": {"iterative_sequence": True}})
    assert trouble is ConfigTrouble.REFUSED_LINE
    assert found.startswith("found iterative_sequence: true; the server executes a request again")


@pytest.mark.parametrize("other", [{"backend": "onnxruntime"}, {"platform": "ensemble", "backend": ""}])
def test_what_cannot_have_that_path_is_not_examined(other: dict[str, Any]) -> None:
    assert found_in({**FINE, **other, "parameters": {}, "response_cache": {"enable": True}}) == []


@pytest.mark.parametrize(
    ("config", "does"),
    [
        (FINE, True),
        ({"parameters": {"shm_path": {}}}, True),
        ({"input": [{"name": "SHM"}]}, True),
        ({"input": [{"name": "X", "optional": True}], "parameters": {"OTHER": {}}}, False),
        ({}, False),
    ],
)
def test_what_mentions_shared_memory(config: dict[str, Any], does: bool) -> None:
    assert mentions_shared_memory(config) is does


def test_a_misspelt_declaration_is_one_trouble() -> None:
    """One that has the prefix is named as such; the library does not look at another one."""
    plain = {**FINE, "max_batch_size": 0, "input": FINE["input"][:2]}  # no SHM, which declares paths, too
    [(trouble, found)] = found_in({**plain, "parameters": {"SHM_PATH": {"string_value": "direct"}}})
    assert trouble is ConfigTrouble.UNKNOWN_PARAMETER
    assert found.endswith("did you mean SHM_PATHS?")
    other = {**plain, "parameters": {"SMH_PATHS": {"string_value": "direct"}}}
    expected = "found no parameter SHM_PATHS, but SMH_PATHS, which may be meant to be it"
    assert found_in(other) == [(ConfigTrouble.NO_SHM_PATHS, expected)]
    assert mentions_shared_memory({"parameters": other["parameters"]})
