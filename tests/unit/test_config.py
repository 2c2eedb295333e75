"""What config.pbtxt says of shared memory, what auto_complete makes of it, and what the log advises at load."""

from __future__ import annotations

import itertools
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
    ("name", "told"),
    [
        ("SHM_PATH", "has an unknown parameter SHM_PATH; did you mean SHM_PATHS"),
        ("shm_paths", "has an unknown parameter shm_paths; did you mean SHM_PATHS"),
        ("SHM_ALOWED_UIDS", "has an unknown parameter SHM_ALOWED_UIDS; did you mean SHM_ALLOWED_UIDS"),
        ("SHM_QQQQQQ", "".join(f"(?=.*{name})" for name in PARAMETERS)),
        *((name, f"{name} is gone: all memory has ordinary pages") for name in ("SHM_HUGE_PAGES", "shm_huge_pages")),
    ],
    ids=range(6),
)
def test_a_name_that_is_none_of_ours_is_refused_and_told_which_are(name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        config(**{name: "false"})


def test_the_known_names_are_those_that_are_read_and_those_that_the_page_tells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    source = Path(config_module.__file__).read_text()
    read = set(re.findall(r'"(SHM_[A-Z_]+)"', source[source.index("class Config") :]))
    assert read | {"SHM_PATHS", "SHM_ALLOWED_UIDS"} == PARAMETERS
    assert set(re.findall(r"^\| `(SHM_[A-Z_]+)` \|", page, re.MULTILINE)) == PARAMETERS


BOOLEANS: dict[str, object] = {"true": True, "false": False}
SAID: dict[str, dict[str, object]] = {
    "SHM_STREAM_TOTAL_PATIENCE_S": {"20": 20.0},
    "SHM_HANDOVER_S": {"0.25": 0.25, "60": 60.0},
    "SHM_SERVER_URL": {"http://127.0.0.1:9": "http://127.0.0.1:9"},
    "SHM_ALLOWED_UIDS": {"1000, 1001": {1000, 1001}, "65534": {65534}, "any": None, " any ": None},
    "SHM_FOREIGN_REGIONS": {"registered": True, "off": False},
    "SHM_INLINE_BYTES": {"0": 0, "65536": 1 << 16},
    "SHM_MAX_MAPPED_BYTES": {"1073741824": 1 << 30},
    "SHM_REGISTRATIONS": {"checked": True, "trusted": False},
    **dict.fromkeys(("SHM_METRICS", "SHM_DEBUG", "SHM_GPU_EVENTS", "SHM_PIN_HOST_MEMORY"), BOOLEANS),
}


def test_a_parameter_means_what_it_says() -> None:
    for name, said in SAID.items():
        field = "checks_registrations" if name == "SHM_REGISTRATIONS" else name.removeprefix("SHM_").lower()
        assert {text: getattr(config(**{name: text}), field) for text in said} == said
    assert Config.from_config({}) == config(EXECUTION_ENV_PATH="another's") == Config()
    found = config()
    assert (found.handover_s, found.allowed_uids, found.max_mapped_bytes) == (1, frozenset({os.geteuid(), 0}), None)
    assert (found.foreign_regions, found.checks_registrations, found.metrics, found.debug) == (True, True, False, False)
    found = config(SHM_STREAM_PATIENCE_S="2", SHM_STREAM_TOTAL_PATIENCE_S="7.5")
    assert (found.stream_patience_s, found.stream_total_patience_s) == (2, 7.5)
    assert config(SHM_STREAM_PATIENCE_S="600").stream_total_patience_s == 600


NO_TIMES = ["", "0", "-1", "nan", "inf", "a minute"]


@pytest.mark.parametrize(
    ("names", "expected", "wrong"),
    [
        ("SHM_STREAM_PATIENCE_S SHM_STREAM_TOTAL_PATIENCE_S", "seconds, more than 0", NO_TIMES),
        ("SHM_HANDOVER_S", "seconds, more than 0 and at most 60", [*NO_TIMES, "60.1", "1e9"]),
        ("SHM_SERVER_URL", "http://HOST:PORT", ["", "h:8000", "ftp://h", "http://", "http://h:p", "http://h:0", "8"]),
        ("SHM_ALLOWED_UIDS", "user ids", ["", "root", "1000,", "-1", "1000 1001", "any,1000", "0x3e8", "1.5"]),
        ("SHM_FOREIGN_REGIONS", "registered or off", ["", "on", "OFF", "false", "any"]),
        ("SHM_INLINE_BYTES", "a number of bytes", ["", "16 KiB", "-1"]),
        ("SHM_MAX_MAPPED_BYTES", "a number of bytes", ["", "0", "1 GiB", "-1", "1e9", "1.0", "none"]),
        ("SHM_METRICS SHM_GPU_EVENTS SHM_PIN_HOST_MEMORY", "true or false", ["", "on", "True", "1", "yes"]),
        ("SHM_REGISTRATIONS", "checked or trusted", ["", "on", "true", "Trusted", "trusted "]),
    ],
)
def test_a_parameter_that_means_nothing_is_refused(names: str, expected: str, wrong: list[str]) -> None:
    for name, text in itertools.product(names.split(), wrong):
        with pytest.raises(ModelError, match=f"parameter {name} is .*; expected {expected}"):
            config(**{name: text})


CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
X: dict[str, Any] = {"name": "X", "data_type": "TYPE_FP32", "dims": [3]}
DIRECT = {"SHM_PATHS": {"string_value": "direct"}}
LISTED = X | {"format": "FORMAT_NONE", "reshape": {"shape": [1, 3]}}  # config.pbtxt has it, and says more of it


def triton_config(**described: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "parameters": {}} | described))


def test_every_input_becomes_optional_and_stays_what_it_is_otherwise() -> None:
    config = triton_config(input=[X, LISTED | {"name": "Z", "optional": True}])
    assert auto_complete(config) is config
    assert config.as_dict()["input"] == [X | {"optional": True}, LISTED | {"name": "Z", "optional": True}, CARRIER]
    batched = triton_config(max_batch_size=8, parameters=DIRECT)
    assert auto_complete(batched).as_dict()["input"] == [CARRIER], "which is needed for batches"
    own = {"name": "SHM", "data_type": "TYPE_FP32", "dims": [3], "optional": True}
    config = auto_complete(triton_config(input=[own], parameters=DIRECT))
    assert config.as_dict()["input"] == [own], "no carrier is needed"


CARRIERS_LINE = '{ name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }'


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_a_false_carrier_is_named_with_its_line(max_batch_size: int) -> None:
    with pytest.raises(ModelError, match=r"model 'm' has input SHM \(TYPE_UINT8 \[4\], optional\), but") as caught:
        auto_complete(triton_config(max_batch_size=max_batch_size, input=[CARRIER | {"dims": [4]}]))
    assert str(caught.value).endswith(f"write {CARRIERS_LINE} in config.pbtxt")


EVERY_PATH = {"SHM_PATHS": "direct,triton-shm,inline"}


def lines(
    parameters: dict[str, str] | None = None, *, stub_reads_numpy: bool = True, dtype: str = "FP32", **more: Any
) -> list[str]:
    said = {name: {"string_value": text} for name, text in (parameters or {}).items()}
    made = {"name": "m", "input": [tensor("X", dtype)], "output": [tensor("Y", dtype)], "parameters": said, **more}
    return list(load_warnings(ModelSpec.from_config(made), made, stub_reads_numpy=stub_reads_numpy))


def test_a_session_that_no_client_shares_memory_with_is_told_all_lines_to_add() -> None:
    assert lines(EVERY_PATH) == lines({"SHM_PATHS": "inline"}) == lines(input=[tensor("X"), CARRIER]) == []
    (line,) = lines()
    assert "no client shares memory with model 'm'" in line
    assert 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }' in line
    _, line = lines(input=[tensor("X", optional=False)])
    assert "add `optional: true` to it" in line
    _, line = lines(max_batch_size=8)
    assert CARRIERS_LINE in line


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
