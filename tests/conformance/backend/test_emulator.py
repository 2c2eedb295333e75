"""Every check, in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.testing.emulator import Faults
from tests.conformance.backend.asking import DECOUPLED, INPUTS, PARAMETERS
from tests.conformance.backend.backend_checks import CHECKS, FAULT_CHECKS
from tests.conformance.backend.emulated import EmulatedServer

FOLDER = Path(__file__).parent / "models"


@pytest.fixture(scope="module")
def server() -> EmulatedServer:
    return EmulatedServer(FOLDER)


@pytest.mark.parametrize("check", CHECKS)
def test_the_emulator_behaves_as_the_check_says(server: EmulatedServer, check: str) -> None:
    is_decoupled = DECOUPLED in check
    model = "checks_decoupled" if is_decoupled else "checks"
    for _ in range(1 + is_decoupled):
        answers = server.run(
            model,
            INPUTS,
            {"check": check, **PARAMETERS},
            ["REPORT"],
            request_id="the-id",
            correlation_id=42,
            flags=1,
            timeout_us=9_000_000,
        )
    report = _report(answers)
    assert not report, report


@pytest.mark.parametrize("check", FAULT_CHECKS)
def test_the_emulator_has_the_fault_that_is_switched_on(check: str) -> None:
    server = EmulatedServer(FOLDER, Faults(is_stub_for_numpy_1=True))
    inputs = [tensor for tensor in INPUTS if tensor[1] != "BYTES"]
    ((response, _),) = server.run("checks", inputs, {"check": check}, ["REPORT"])
    report = response.error().message().removeprefix("report:")
    assert not report, report


def _report(answers: list[Any]) -> str:
    response, _ = answers[0]
    return str(response.output_tensors()[0].as_numpy()[0])
