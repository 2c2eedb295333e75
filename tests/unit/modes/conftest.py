"""Sessions for each way to call them, and clients, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from shm_backend_utils.model import ShmSession
from tests.unit.modes.doubling import MakeClient, Open
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


@pytest.fixture
def open_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_session(inputs: Any = None, outputs: Any = None, **more: Any) -> ShmSession:
            return stack.enter_context(
                session_of(monkeypatch, inputs or [tensor("X")], outputs or [tensor("Y")], **more)
            )

        yield open_session


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    with ExitStack() as stack:

        def make_client(**more: Any) -> Client:
            client = Client(**more)
            stack.callback(client.close)
            return client

        yield make_client
