"""The doctor's examinations, without what takes longer than all else."""

from __future__ import annotations

import pytest

from shm_backend_utils.cli import doctor


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine not be looked at; ``test_machine_checks`` looks at it."""
    monkeypatch.setattr(doctor, "findings_on_machine", list)
