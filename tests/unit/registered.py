"""Stands in for the server where tests say themselves what is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from shm_backend_utils.memory.registrations import Registration, StatusEndpoint

__all__ = ["say_registered"]


def say_registered(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Mapping[str, Registration]]) -> None:
    """Have every model hear that this is registered at its server."""

    def find(_: StatusEndpoint, names: Sequence[str]) -> dict[str, Registration]:
        current = found()
        return {name: current[name] for name in names if name in current}

    monkeypatch.setattr(StatusEndpoint, "find", find)
    monkeypatch.setattr(StatusEndpoint, "all", lambda _: dict(found()))
