"""A valid request that the tests of this folder break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.server import EmbeddedServer

from ..hand_made import HandMade
from .breaks import valid


@pytest.fixture
def made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    with valid(triton_server.grpc_url) as request:
        yield request
