"""Requests in Triton's own shared memory that a client gives up, while the server is still busy with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.server import EmbeddedServer
from tests.crash.registered import SomebodyElse

X = {"X": np.zeros(1, np.float32)}


@pytest.mark.parametrize("count", [1, 3])
def test_their_memory_is_unregistered_when_the_server_is_done(
    triton_server: EmbeddedServer, tmp_path: Path, count: int
) -> None:
    note = str(tmp_path / "note")
    with SomebodyElse.at(triton_server) as somebody:
        with ShmClient(triton_server.grpc_url) as client:
            for _ in range(count):
                with pytest.raises(DeadlineExceededError):
                    client.infer("call_facts", X, path="triton-shm", parameters={"note": note}, timeout_s=0.2)
        assert somebody.registered_by_this_process() == set()
