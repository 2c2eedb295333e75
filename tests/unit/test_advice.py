"""What the server's log says at load of a model that works, and yet not as its author will expect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.advice import advice
from shm_backend_utils.model_spec import ModelSpec
from tests.unit.emulated import log_lines, start_server
from tests.unit.sessions import tensor

EVERY_PATH = {"SHM_PATHS": "direct,triton-shm,inline"}


def lines(
    parameters: dict[str, str] | None = None, *, stub_reads_numpy: bool = True, dtype: str = "FP32", **more: Any
) -> list[str]:
    said = {name: {"string_value": text} for name, text in (parameters or {}).items()}
    made = {"name": "m", "input": [tensor("X", dtype)], "output": [tensor("Y", dtype)], "parameters": said, **more}
    return list(advice(ModelSpec.from_config(made), stub_reads_numpy=stub_reads_numpy))


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


def test_strings_on_a_stub_for_another_numpy_are_told_of() -> None:
    (line,) = lines(EVERY_PATH, stub_reads_numpy=False, dtype="STRING")
    assert "strings (X, Y)" in line
    assert "install numpy<2" in line
    assert lines(EVERY_PATH, stub_reads_numpy=False) == []
    assert lines(EVERY_PATH, dtype="STRING") == []


def test_the_servers_log_has_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server(monkeypatch)
    config = {"name": "m", "input": [tensor("X")], "output": [tensor("Y")]}
    ShmSession.from_args({"model_config": json.dumps(config)}).close()
    (line,) = log_lines()
    assert line.startswith("no client shares memory with model 'm'")
