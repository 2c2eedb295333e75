"""What the server's log says at load of a model that works, and yet not as its author will expect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.model import config
from shm_backend_utils.model.advice import advice
from shm_backend_utils.model.config import PARAMETERS
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.testing.fake_backend import Logger
from tests.unit.sessions import session_of, tensor

README = Path(__file__).parents[2] / "README.md"
EVERY_PATH = {"SHM_PATHS": "direct,triton-shm,inline"}


def lines(
    parameters: dict[str, str] | None = None, *, stub_reads_numpy: bool = True, dtype: str = "FP32", **more: Any
) -> list[str]:
    said = {name: {"string_value": text} for name, text in (parameters or {}).items()}
    made = {"name": "m", "input": [tensor("X", dtype)], "output": [tensor("Y", dtype)], "parameters": said, **more}
    return list(advice(made, ModelSpec.from_config(made), stub_reads_numpy=stub_reads_numpy))


def test_a_model_that_declares_its_paths_gets_no_advice() -> None:
    assert lines(EVERY_PATH) == []
    assert lines({"SHM_PATHS": "inline"}) == []


def test_a_batch_carrier_declares_paths_too() -> None:
    carrier = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
    assert lines(input=[tensor("X"), carrier]) == []


def test_a_session_that_no_client_shares_memory_with_is_told_the_line_to_add() -> None:
    (line,) = lines()
    assert "no client shares memory with model 'm'" in line
    assert 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }' in line


def test_a_session_that_no_client_shares_memory_with_is_told_all_lines_to_add() -> None:
    _, line = lines(input=[tensor("X", optional=False)])
    assert "add `optional: true` to it" in line
    _, line = lines(max_batch_size=8)
    assert '{ name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }' in line


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("SHM_PATH", "SHM_PATHS"),
        ("shm_paths", "SHM_PATHS"),
        ("SHM_ALLOWED_UID", "SHM_ALLOWED_UIDS"),
        ("SHMPATHS", "SHM_PATHS"),
    ],
)
def test_a_parameter_that_is_nearly_one_of_ours_is_told_which(typo: str, meant: str) -> None:
    assert lines({**EVERY_PATH, typo: "inline"}) == [
        f"the parameter {typo} of model 'm' means nothing; did you mean {meant}?"
    ]


def test_a_parameter_that_is_like_none_of_ours_is_told_all() -> None:
    (line,) = lines({**EVERY_PATH, "SHM_QQQQQQ": "1"})
    assert all(name in line for name in PARAMETERS)


def test_parameters_of_others_are_theirs() -> None:
    assert lines({**EVERY_PATH, "EXECUTION_ENV_PATH": "x", "paths": "y"}) == []


def test_strings_on_a_stub_for_another_numpy_are_told_of() -> None:
    (line,) = lines(EVERY_PATH, stub_reads_numpy=False, dtype="STRING")
    assert "strings (X, Y)" in line
    assert "install numpy<2" in line
    assert lines(EVERY_PATH, stub_reads_numpy=False) == []
    assert lines(EVERY_PATH, dtype="STRING") == []


def test_the_servers_log_has_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters={"SHM_PATH": "direct"}):
        assert [line.partition(":")[0] for line in Logger.lines] == [
            "no client shares memory with model 'm', though it makes a ShmSession",
            "the parameter SHM_PATH of model 'm' means nothing; did you mean SHM_PATHS?",
        ]


def test_the_known_parameters_are_those_that_are_read_and_those_that_the_readme_lists() -> None:
    source = Path(config.__file__).read_text()
    body = source[source.index("class Config") :]
    assert set(re.findall(r'"(SHM_[A-Z_]+)"', body)) | {"SHM_PATHS", "SHM_ALLOWED_UIDS"} == PARAMETERS
    assert set(re.findall(r"^\| `(SHM_[A-Z_]+)` \|", README.read_text(), re.MULTILINE)) <= PARAMETERS
    assert set(re.findall(r"SHM_[A-Z_]+", README.read_text())) >= PARAMETERS
