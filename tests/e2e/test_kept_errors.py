"""An error that somebody keeps does not keep the memory of the call that failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.errors import CallerError
from shm_backend_utils.server import EmbeddedServer

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


@pytest.mark.parametrize("call", [infer, prepare])
def test_a_call_that_cannot_be_encoded(client: ShmClient, call: Callable[[ShmClient], None]) -> None:
    with pytest.raises((CallerError, InferenceError), match="parameter 'text' is|surrogate") as kept:
        call(client)
    assert client.stats().slots_held == 0
    assert kept.value.args


def test_a_stream_that_cannot_be_encoded(triton_server: EmbeddedServer) -> None:
    with ShmClient(triton_server.grpc_url) as client:
        results = client.stream("frames_of", {"X": X[0]}, outputs=["Y"], path="direct", parameters=BY_GRPC_NOR_HTTP)
        with pytest.raises(CallerError, match="parameter 'text' is") as kept:
            next(results)
        assert client.stats().slots_held == 0
        assert kept.value.args
