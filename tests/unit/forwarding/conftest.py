"""Two models for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.forwarding.two_models import Models, config, two_models


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The other one serves the direct path."""
    with two_models(monkeypatch, config("other")) as models:
        yield models


@pytest.fixture
def stock_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The other one takes ordinary requests alone, and nobody tells what it is like."""
    with two_models(monkeypatch, None) as models:
        yield models
