"""What config.pbtxt says of shared memory, what auto_complete makes of it, and what the log advises at load."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.model import auto_complete
from shm_backend_utils.model import config as config_module
from shm_backend_utils.model.config import PARAMETERS, Config, load_warnings
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.testing.emulator.module import ModelConfig
from tests.unit.sessions import tensor


def config(**parameters: str) -> Config:
    return Config.from_config({"parameters": {name: {"string_value": value} for name, value in parameters.items()}})


@pytest.mark.parametrize(
    ("typo", "meant"), [("SHM_PATH", "SHM_PATHS"), ("shm_paths", "SHM_PATHS"), ("SHM_ALOWED_UIDS", "SHM_ALLOWED_UIDS")]
)
def test_a_name_that_is_nearly_one_of_ours_is_refused_and_told_which(typo: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f"has an unknown parameter {typo}; did you mean {meant}"):
        config(**{typo: "off"})
    with pytest.raises(ModelError) as caught:
        config(SHM_QQQQQQ="1")
    assert all(name in str(caught.value) for name in PARAMETERS)


@pytest.mark.parametrize("name", ["SHM_HUGE_PAGES", "shm_huge_pages"])
def test_huge_pages_have_gone(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is gone: all memory has ordinary pages; remove it from"):
        config(**{name: "false"})


def test_the_known_names_are_those_that_are_read_and_those_that_the_page_tells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    source = Path(config_module.__file__).read_text()
    read = set(re.findall(r'"(SHM_[A-Z_]+)"', source[source.index("class Config") :]))
    assert read | {"SHM_PATHS", "SHM_ALLOWED_UIDS"} == PARAMETERS
    assert set(re.findall(r"^\| `(SHM_[A-Z_]+)` \|", page, re.MULTILINE)) == PARAMETERS


SAID: dict[str, dict[str, object]] = {
    "SHM_STREAM_TOTAL_PATIENCE_S": {"20": 20.0},
    "SHM_HANDOVER_S": {"0.25": 0.25, "60": 60.0},
    "SHM_SERVER_URL": {"http://127.0.0.1:9": "http://127.0.0.1:9"},
    "SHM_ALLOWED_UIDS": {"1000, 1001": {1000, 1001}, "65534": {65534}, "any": None, " any ": None},
    "SHM_FOREIGN_REGIONS": {"registered": True, "off": False},
    "SHM_INLINE_BYTES": {"0": 0, "65536": 1 << 16},
    "SHM_MAX_MAPPED_BYTES": {"1073741824": 1 << 30},
    "SHM_METRICS": {"true": True, "false": False},
    "SHM_DEBUG": {"true": True, "false": False},
    "SHM_GPU_EVENTS": {"true": True, "false": False},
    "SHM_PIN_HOST_MEMORY": {"true": True, "false": False},
    "SHM_REGISTRATIONS": {"checked": True, "trusted": False},
}


def test_defaults() -> None:
    assert Config.from_config({}) == config(EXECUTION_ENV_PATH="another's") == Config()
    found = config()
    assert (found.handover_s, found.allowed_uids, found.max_mapped_bytes) == (1, frozenset({os.geteuid(), 0}), None)
    assert (found.foreign_regions, found.checks_registrations, found.metrics, found.debug) == (True, True, False, False)


@pytest.mark.parametrize("name", SAID)
def test_a_parameter_means_what_it_says(name: str) -> None:
    field = "checks_registrations" if name == "SHM_REGISTRATIONS" else name.removeprefix("SHM_").lower()
    assert {text: getattr(config(**{name: text}), field) for text in SAID[name]} == SAID[name]


NO_TIMES = ["", "0", "-1", "nan", "inf", "a minute"]


@pytest.mark.parametrize(
    ("name", "expected", "wrong"),
    [
        ("SHM_STREAM_PATIENCE_S", "seconds, more than 0", NO_TIMES),
        ("SHM_STREAM_TOTAL_PATIENCE_S", "seconds, more than 0", NO_TIMES),
        ("SHM_HANDOVER_S", "seconds, more than 0 and at most 60", [*NO_TIMES, "60.1", "1e9"]),
        (
            "SHM_SERVER_URL",
            "http://HOST:PORT",
            ["", "localhost:8000", "ftp://h", "http://", "http://h:port", "http://h:0", "8000"],
        ),
        ("SHM_ALLOWED_UIDS", "user ids", ["", "root", "1000,", "-1", "1000 1001", "any,1000", "0x3e8", "1.5"]),
        ("SHM_FOREIGN_REGIONS", "registered or off", ["", "on", "OFF", "false", "any"]),
        ("SHM_INLINE_BYTES", "a number of bytes", ["", "16 KiB", "-1"]),
        ("SHM_MAX_MAPPED_BYTES", "a number of bytes", ["", "0", "1 GiB", "-1", "1e9", "1.0", "none"]),
        ("SHM_METRICS", "true or false", ["", "on", "True", "1", "yes"]),
        ("SHM_GPU_EVENTS", "true or false", ["yes"]),
        ("SHM_PIN_HOST_MEMORY", "true or false", ["yes"]),
        ("SHM_REGISTRATIONS", "checked or trusted", ["", "on", "true", "Trusted", "trusted "]),
    ],
)
def test_a_parameter_that_means_nothing_is_refused(name: str, expected: str, wrong: list[str]) -> None:
    for text in wrong:
        with pytest.raises(ModelError, match=f"parameter {name} is .*; expected {expected}"):
            config(**{name: text})


def test_the_patience_of_streams_is_for_a_frame_and_for_all_of_them() -> None:
    found = config(SHM_STREAM_PATIENCE_S="2", SHM_STREAM_TOTAL_PATIENCE_S="7.5")
    assert (found.stream_patience_s, found.stream_total_patience_s) == (2, 7.5)
    assert config(SHM_STREAM_PATIENCE_S="600").stream_total_patience_s == 600


CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
X: dict[str, Any] = {"name": "X", "data_type": "TYPE_FP32", "dims": [3]}
LISTED = X | {"format": "FORMAT_NONE", "reshape": {"shape": [1, 3]}}  # config.pbtxt has it, and says more of it


def triton_config(**described: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "parameters": {}} | described))


def declares(paths: str) -> dict[str, Any]:
    return {"SHM_PATHS": {"string_value": paths}}


def test_every_input_becomes_optional_and_stays_what_it_is_otherwise() -> None:
    config = triton_config(input=[X, LISTED | {"name": "Z", "optional": True}])
    assert auto_complete(config) is config
    assert config.as_dict()["input"] == [X | {"optional": True}, LISTED | {"name": "Z", "optional": True}, CARRIER]
    batched = triton_config(max_batch_size=8, parameters=declares("direct"))
    assert auto_complete(batched).as_dict()["input"] == [CARRIER], "which is needed for batches"


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_a_false_carrier_is_named_with_its_line(max_batch_size: int) -> None:
    with pytest.raises(ModelError, match=r"model 'm' has input SHM \(TYPE_UINT8 \[4\], optional\), but") as caught:
        auto_complete(triton_config(max_batch_size=max_batch_size, input=[CARRIER | {"dims": [4]}]))
    line = '{ name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }'
    assert str(caught.value).endswith(f"write {line} in config.pbtxt")


def test_an_input_of_the_carriers_name_may_stay_where_no_carrier_is_needed() -> None:
    own = {"name": "SHM", "data_type": "TYPE_FP32", "dims": [3], "optional": True}
    config = auto_complete(triton_config(input=[own], parameters=declares("direct")))
    assert config.as_dict()["input"] == [own]


EVERY_PATH = {"SHM_PATHS": "direct,triton-shm,inline"}


def lines(
    parameters: dict[str, str] | None = None, *, stub_reads_numpy: bool = True, dtype: str = "FP32", **more: Any
) -> list[str]:
    said = {name: {"string_value": text} for name, text in (parameters or {}).items()}
    made = {"name": "m", "input": [tensor("X", dtype)], "output": [tensor("Y", dtype)], "parameters": said, **more}
    return list(load_warnings(ModelSpec.from_config(made), made, stub_reads_numpy=stub_reads_numpy))


def test_a_model_that_declares_its_paths_gets_no_advice() -> None:
    assert lines(EVERY_PATH) == lines({"SHM_PATHS": "inline"}) == lines(input=[tensor("X"), CARRIER]) == []


def test_a_session_that_no_client_shares_memory_with_is_told_all_lines_to_add() -> None:
    (line,) = lines()
    assert "no client shares memory with model 'm'" in line
    assert 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }' in line
    _, line = lines(input=[tensor("X", optional=False)])
    assert "add `optional: true` to it" in line
    _, line = lines(max_batch_size=8)
    assert '{ name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }' in line


@pytest.mark.parametrize(
    ("input_", "more", "paths", "is_told"),
    [
        ({}, {"dynamic_batching": {}}, EVERY_PATH, True),
        ({"allow_ragged_batch": True}, {"dynamic_batching": {}}, EVERY_PATH, False),
        ({"dims": [4]}, {"dynamic_batching": {}}, EVERY_PATH, False),
        ({}, {}, EVERY_PATH, False),
        ({}, {"dynamic_batching": {}}, {"SHM_PATHS": "direct"}, False),
    ],
)
def test_ragged_inputs_told(input_: dict[str, Any], more: dict[str, Any], paths: dict[str, str], is_told: bool) -> None:
    told = lines(paths, input=[{**tensor("X"), **input_}, CARRIER], max_batch_size=8, **more)
    assert [("X" in line, "`allow_ragged_batch: true`" in line) for line in told] == [(True, True)] * is_told


def test_strings_on_a_stub_for_another_numpy_are_told_of() -> None:
    (line,) = lines(EVERY_PATH, stub_reads_numpy=False, dtype="STRING")
    assert "strings (X, Y)" in line
    assert "install numpy<2" in line
    assert lines(EVERY_PATH, stub_reads_numpy=False) == []
    assert lines(EVERY_PATH, dtype="STRING") == []
