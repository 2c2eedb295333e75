"""Stands in for the server where tests say themselves what is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from shm_backend_utils.memory.registrations import Registration, Registrations

__all__ = ["say_registered"]


def say_registered(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Mapping[str, Registration]]) -> None:
    """Have every model hear that this is registered at its server."""

    def find(_: Registrations, names: Sequence[str]) -> dict[str, Registration]:
        current = found()
        return {name: current[name] for name in names if name in current}

    monkeypatch.setattr(Registrations, "find", find)
    monkeypatch.setattr(Registrations, "all", lambda _: dict(found()))
