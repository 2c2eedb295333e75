"""Every check, in the emulator, as a harness has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.testing.harness import Faults, ModelHarness
from tests.conformance.backend.asking import ask, models_in
from tests.conformance.backend.backend_checks import CHECKS, FAULT_CHECKS
from tests.unit.harness.wires import HarnessWire


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return sorted(models_in(tmp_path_factory.mktemp("conformance") / "models").iterdir())


@pytest.fixture(scope="module")
def wire(models: list[Path]) -> Iterator[HarnessWire]:
    with ModelHarness(*models) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.fixture(scope="module")
def wire_for_numpy_1(models: list[Path]) -> Iterator[HarnessWire]:
    with ModelHarness(*models, faults=Faults(is_stub_for_numpy_1=True)) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.mark.parametrize("check", CHECKS)
def test_the_emulator_behaves_as_the_check_says(wire: HarnessWire, check: str) -> None:
    report = ask(wire, check)
    assert not report, report


@pytest.mark.parametrize("check", FAULT_CHECKS)
def test_the_emulator_has_the_fault_that_is_switched_on(wire_for_numpy_1: HarnessWire, check: str) -> None:
    report = ask(wire_for_numpy_1, check)
    assert not report, report
