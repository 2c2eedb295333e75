"""An error that somebody keeps does not keep the memory of the call that failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol import descriptor

X = np.ones((1, 4), np.float32)


def infer(client: ShmClient) -> None:
    client.infer("rows", {"X": X}, outputs=["DOUBLED"], path="direct")


def prepare(client: ShmClient) -> None:
    client.prepare("rows", {"X": (X.shape, X.dtype)}, outputs=["DOUBLED"], path="direct")


@pytest.mark.parametrize("call", [infer, prepare])
def test_a_call_that_cannot_be_described(
    client: ShmClient, monkeypatch: pytest.MonkeyPatch, call: Callable[[ShmClient], None]
) -> None:
    monkeypatch.setattr(descriptor, "MAX_DESCRIPTOR_LENGTH", 10)
    with pytest.raises(TableError, match="expected at most 10") as kept:
        call(client)
    assert client.stats().slots_held == 0
    assert kept.value.field == ""
