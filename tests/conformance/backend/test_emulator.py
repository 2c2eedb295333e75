"""Every check, in the emulator, as a harness has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.testing.harness import Faults, ModelHarness
from tests.conformance.backend.asking import ask, models_in
from tests.conformance.backend.backend_checks import CHECKS, FAULT_CHECKS
from tests.unit.harness.wires import HarnessWire


@contextlib.contextmanager
def _emulated(folder: Path, **options: Any) -> Iterator[HarnessWire]:
    with ModelHarness(*sorted(models_in(folder / "models").iterdir()), **options) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessWire]:
    with _emulated(tmp_path_factory.mktemp("conformance")) as wire:
        yield wire


@pytest.mark.parametrize("check", CHECKS)
def test_the_emulator_behaves_as_the_check_says(wire: HarnessWire, check: str) -> None:
    report = ask(wire, check)
    assert not report, report


def test_the_emulator_has_the_fault_that_is_switched_on(tmp_path: Path) -> None:
    with _emulated(tmp_path, faults=Faults(is_stub_for_numpy_1=True)) as wire:
        assert {check: report for check in FAULT_CHECKS if (report := ask(wire, check))} == {}
