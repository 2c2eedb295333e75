"""What the tests of this folder have a model do, and the sessions that serve batches and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.model import ShmSession
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

FP32 = BY_NAME["FP32"]
X = np.arange(4, dtype=np.float32)

Open = Callable[..., ShmSession]
MakeClient = Callable[..., Client]


def batched(open_session: Open, **more: Any) -> ShmSession:
    """Open a session of batches of rows X, whose answers are rows Y."""
    inputs = [tensor("X", dims=[-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("Y", dims=[-1])], max_batch_size=8, **more)


def carrier_of(rows: int) -> dict[str, Any]:
    """Return what tells Triton of so many rows."""
    return {"SHM": np.empty((rows, 0), np.uint8)}


def streaming(open_session: Open, **more: Any) -> ShmSession:
    return open_session(model_transaction_policy={"decoupled": True}, **more)
