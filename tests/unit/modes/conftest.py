"""A session for each way to call it, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.model import ShmSession
from tests.unit.modes.doubling import Open
from tests.unit.sessions import session_of, tensor


@pytest.fixture
def open_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[Any] = []

    def open_session(inputs: Any = None, outputs: Any = None, **more: Any) -> ShmSession:
        manager = session_of(monkeypatch, inputs or [tensor("X")], outputs or [tensor("Y")], **more)
        opened.append(manager)
        return manager.__enter__()

    yield open_session
    for manager in opened:
        manager.__exit__(None, None, None)
