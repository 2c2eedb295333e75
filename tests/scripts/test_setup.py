"""What ``scripts/setup`` makes anew, and what it leaves alone."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

setup = importlib.import_module("scripts.tools.setup.__main__")


def test_an_environment_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = elsewhere / "made-by-scripts-setup"
    kept.write_text("another checkout's")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(elsewhere)
    monkeypatch.setattr(setup, "ROOT", checkout)

    environment = setup.Environment(".venv", [], [], [])
    with pytest.raises(setup.StepFailedError) as refusal:
        environment.create()

    assert kept.read_text() == "another checkout's"
    assert str(refusal.value) == (
        f"{checkout}/.venv is a link to {elsewhere}, and making it anew would empty that folder: remove the link first"
    )
