"""Requests whose tensors lie in regions that are registered at the server, and named."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.registrations import Registration
from tests.unit.emulated import delivered, message_of, outputs_of
from tests.unit.modes.doubling import Open
from tests.unit.registered import say_registered
from tests.unit.sessions import double

SHM = Path("/dev/shm")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Registration]]:
    found: dict[str, Registration] = {}
    say_registered(monkeypatch, lambda: found)
    yield found
    for registration in found.values():
        (SHM / registration.key).unlink(missing_ok=True)


def file_of(byte_size: int = 4096) -> str:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    (SHM / key).write_bytes(bytes(byte_size))
    return key


def descriptor(inputs: Any, outputs: Any, names: Sequence[str]) -> dict[str, str]:
    regions = [{"kind": "named", "name": name} for name in names]
    return {"shm_io": json.dumps({"v": 1, "model": "m", "regions": regions, "inputs": inputs, "outputs": outputs})}


def test_registered_regions_are_named_by_a_descriptor(open_session: Open, registered: dict[str, Registration]) -> None:
    key = file_of()
    registered["mine"] = Registration(key, 64, 1024)
    file = np.memmap(SHM / key, np.float32, "r+")
    file[16:20] = [1, 2, 3, 4]
    request = delivered(descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [0, 256, 16]}, ["mine"]), ["Y"])
    session = open_session()
    for _ in range(2):
        (response,) = session.serve([request], double)
        assert (response.error(), outputs_of(response)) == (None, {})
        assert file[80:84].tolist() == [2, 4, 6, 8]
    # What is passed on must be copied: no results tell where it is.
    session.serve([request], lambda call: call.put("Y", call.input("X")))
    assert file[80:84].tolist() == [1, 2, 3, 4]


X_ALONE: dict[str, Any] = {"inputs": {"X": [0, 0, 16, "FP32", [4]]}, "outputs": {}}
Y_ALONE: dict[str, Any] = {"inputs": {}, "outputs": {"Y": [0, 0, 16]}}
each_alone = pytest.mark.parametrize(("spans", "field"), [(X_ALONE, "inputs.X"), (Y_ALONE, "outputs.Y")])


@each_alone
def test_a_registration_whose_offset_is_odd_makes_its_tensors_odd(
    open_session: Open, registered: dict[str, Registration], spans: dict[str, Any], field: str
) -> None:
    registered["mine"] = Registration(file_of(), 2, 1024)
    (response,) = open_session().serve([delivered(descriptor(**spans, names=["mine"]), ["Y"])], double)
    assert message_of(response).startswith(f"shm:table: {field}.offset: found 0, expected a place at a multiple of 4")


@each_alone
def test_spans_one_byte_beyond_what_is_registered_are_refused(
    open_session: Open, registered: dict[str, Registration], spans: dict[str, Any], field: str
) -> None:
    registered["mine"] = Registration(file_of(), 0, 15)
    (response,) = open_session().serve([delivered(descriptor(**spans, names=["mine"]), ["Y"])], double)
    assert message_of(response).startswith(f"shm:table: {field}: found 16 bytes at offset 0")
