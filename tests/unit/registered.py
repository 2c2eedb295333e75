"""Stands in for the server where tests say themselves what is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from shm_backend_utils.memory.registrations import Registration, Registrations

__all__ = ["say_registered"]


def say_registered(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Mapping[str, Registration]]) -> None:
    """Have every model hear that this is registered at its server."""
    monkeypatch.setattr(Registrations, "find", lambda _, name: found().get(name))
    monkeypatch.setattr(Registrations, "all", lambda _: dict(found()))
