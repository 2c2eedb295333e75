"""Sessions for each way to call them, and clients, in the test's own process; and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.model import ShmSession
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

FP32 = BY_NAME["FP32"]
X = np.arange(4, dtype=np.float32)

Open = Callable[..., ShmSession]
MakeClient = Callable[..., Client]


def batched(open_session: Open, **more: Any) -> ShmSession:
    inputs = [tensor("X", dims=[-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("Y", dims=[-1])], max_batch_size=8, **more)


def carrier_of(rows: int) -> dict[str, Any]:
    return {"SHM": np.empty((rows, 0), np.uint8)}


def streaming(open_session: Open, **more: Any) -> ShmSession:
    return open_session(model_transaction_policy={"decoupled": True}, **more)


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
