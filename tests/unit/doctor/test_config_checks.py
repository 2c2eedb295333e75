"""What a model's configuration has against the direct path: each thing is broken, and found with what it is about."""

from __future__ import annotations

from typing import Any

import pytest

from shm_backend_utils.cli.doctor.config_checks import findings_in_config, mentions_shared_memory
from shm_backend_utils.cli.doctor.troubles import Trouble
from shm_backend_utils.model.config import PARAMETERS

X, W, SHM = (
    {"name": name, "data_type": f"TYPE_{dtype}", "dims": ["-1"], "optional": True}
    for name, dtype in (("X", "FP32"), ("W", "FP32"), ("SHM", "UINT8"))
)
FINE: dict[str, Any] = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 8,
    "input": [X, W, SHM],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
}
WITHOUT_BATCHES = {**FINE, "max_batch_size": 0, "input": [X, W]}
AS_THE_SERVER_TELLS = {
    "platform": "",
    "response_cache": {"enable": False},
    "model_transaction_policy": {"decoupled": True},
}


def with_parameters(**parameters: str) -> dict[str, Any]:
    said = {name: {"string_value": value} for name, value in parameters.items()}
    return {**FINE, "parameters": {**FINE["parameters"], **said}}


def required(tensor: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tensor.items() if name != "optional"}


def found_in(config: dict[str, Any]) -> list[tuple[Trouble, str]]:
    findings = findings_in_config(config, "m")
    assert {finding.model for finding in findings} <= {"m"}
    return [(finding.trouble, finding.found) for finding in findings]


@pytest.mark.parametrize(
    "config",
    [
        *(FINE, {**FINE, **AS_THE_SERVER_TELLS}, WITHOUT_BATCHES),
        *(
            {**FINE, **other, "parameters": {}, "response_cache": {"enable": True}}
            for other in ({"backend": "onnxruntime"}, {"platform": "ensemble", "backend": ""})
        ),
    ],
)
def test_nothing_is_wrong_or_it_cannot_have_that_path(config: dict[str, Any]) -> None:
    assert found_in(config) == []


WRONG: list[tuple[dict[str, Any], Trouble, str]] = [
    ({**FINE, "input": [required(X), required(W), SHM]}, Trouble.INPUTS_NOT_OPTIONAL, "X, W are not optional"),
    ({**FINE, "input": [X, required(W), SHM]}, Trouble.INPUTS_NOT_OPTIONAL, "W is not optional"),
    ({**FINE, "input": [X]}, Trouble.NO_SHM_INPUT, "max_batch_size is 8, and there is no input SHM"),
    *(
        ({**FINE, "input": [X, {**SHM, **change}]}, Trouble.NO_SHM_INPUT, f"is 8, and found input SHM ({found})")
        for change, found in (
            ({"data_type": "TYPE_FP32"}, "TYPE_FP32 [-1], optional"),
            ({"optional": False}, "TYPE_UINT8 [-1], not optional"),
            ({"dims": ["1"]}, "TYPE_UINT8 [1], optional"),
        )
    ),
    ({**WITHOUT_BATCHES, "parameters": {}}, Trouble.NO_SHM_PATHS, "found no parameter SHM_PATHS"),
    (
        {**WITHOUT_BATCHES, "parameters": {"SMH_PATHS": {"string_value": "direct"}}},
        Trouble.NO_SHM_PATHS,
        "found no parameter SHM_PATHS, but SMH_PATHS, which may be a misspelling of it",
    ),
    *(
        (with_parameters(SHM_PATHS=value), Trouble.UNKNOWN_PATH, said)
        for value, said in (
            ("driect,inline", "parameter SHM_PATHS of model 'm' has 'driect'; expected, separated by commas, some of "),
            (" , ", "SHM_PATHS of model 'm' is empty; expected"),
        )
    ),
    (
        {**with_parameters(SHM_PATHS="triton-shm,inline"), "input": [required(X), W, SHM]},
        Trouble.DIRECT_NOT_DECLARED,
        "found SHM_PATHS 'inline,triton-shm'; expected direct among its words",
    ),
    (
        {**WITHOUT_BATCHES, "parameters": {"SHM_PATH": {"string_value": "direct"}}},
        Trouble.UNKNOWN_PARAMETER,
        "did you mean SHM_PATHS?",
    ),
    *(
        (with_parameters(**{name: "nonsense"}), Trouble.BAD_PARAMETER, f"parameter {name} is 'nonsense'; expected")
        for name in sorted(PARAMETERS - {"SHM_PATHS"})
    ),
    (
        {**FINE, "response_cache": {"enable": True}},
        Trouble.RESPONSE_CACHE,
        "found response_cache { enable: true }; Triton's response cache looks at input tensors only",
    ),
    (
        {**FINE, "sequence_batching": {"iterative_sequence": True}},
        Trouble.REFUSED_LINE,
        "found iterative_sequence: true; the server executes a request again",
    ),
]


@pytest.mark.parametrize(("config", "trouble", "said"), WRONG, ids=[f"{trouble.code}" for _, trouble, _ in WRONG])
def test_one_thing_that_is_wrong(config: dict[str, Any], trouble: Trouble, said: str) -> None:
    ((found, told),) = found_in(config)
    assert found is trouble
    assert said in told


def test_every_unknown_parameter_is_told() -> None:
    found = found_in(with_parameters(SHM_DEBG="true", shm_metrics="true", OTHER="x"))
    assert [trouble for trouble, _ in found] == [Trouble.UNKNOWN_PARAMETER] * 2
    for (_, told), meant in zip(found, ("SHM_DEBUG", "SHM_METRICS"), strict=True):
        assert f"did you mean {meant}?" in told


MENTIONING: list[dict[str, Any]] = [
    FINE,
    {"parameters": {"shm_path": {}}},
    {"parameters": {"SMH_PATHS": {"string_value": "direct"}}},
    {"input": [{"name": "SHM"}]},
]


def test_what_mentions_shared_memory() -> None:
    assert all(map(mentions_shared_memory, MENTIONING))
    assert not mentions_shared_memory({"input": [{"name": "X", "optional": True}], "parameters": {"OTHER": {}}})
    assert not mentions_shared_memory({})
