"""An error that somebody keeps does not keep the memory of the call that failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient

X = np.ones((1, 4), np.float32)
BY_GRPC_NOR_HTTP = {"text": "half of a character: \ud800"}
"""Parameters that cannot be encoded."""


def infer(client: ShmClient) -> None:
    client.infer("rows", {"X": X}, outputs=["DOUBLED"], path="direct", parameters=BY_GRPC_NOR_HTTP)


def prepare(client: ShmClient) -> None:
    with client.prepare(
        "rows", {"X": (X.shape, X.dtype)}, outputs=["DOUBLED"], path="direct", parameters=BY_GRPC_NOR_HTTP
    ) as call:
        call.infer()


def stream(client: ShmClient) -> None:
    next(client.stream("frames_of", {"X": X[0]}, outputs=["Y"], path="direct", parameters=BY_GRPC_NOR_HTTP))


@pytest.mark.parametrize("call", [infer, prepare, stream])
def test_a_call_that_cannot_be_encoded(client: ShmClient, call: Callable[[ShmClient], None]) -> None:
    with pytest.raises(ValueError, match="surrogate|UTF-8|utf-8") as kept:
        call(client)
    assert client.stats().slots_held == 0
    assert kept.value.args
