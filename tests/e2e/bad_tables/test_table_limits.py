"""Tables at a limit are served."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.server import EmbeddedServer

from ..hand_made import STEP, HandMade
from .breaks import REGION_SIZE, ROOM, Break, X, is_served, refusals_of, valid


def at_the_end_of_the_region(request: HandMade) -> None:
    request.table["Y"].offset = REGION_SIZE - ROOM


def without_a_gap(request: HandMade) -> None:
    request.table["Y"].offset = 8192 + X.nbytes


def in_the_other_order(request: HandMade) -> None:
    request.table["X"].offset, request.table["Y"].offset = 8192 + STEP, 8192
    request.region.bytes()[8192 + STEP :][: X.nbytes] = X.view(np.uint8)


def with_bytes_behind_the_table(request: HandMade) -> None:
    request.patches = {len(request.table.packed(0)): b"\xff" * 1024}


@pytest.mark.parametrize(
    "change", [at_the_end_of_the_region, without_a_gap, in_the_other_order, with_bytes_behind_the_table]
)
def test_what_is_at_a_limit_is_served(made: HandMade, change: Break) -> None:
    change(made)
    assert is_served(made)


def test_the_longest_name_is_told_as_far_as_an_error_goes(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        request.table["X"].name = "ß".encode() * 32_000
        (status, text), (_, over_http) = refusals_of(request, triton_server)
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text == over_http
        assert text.startswith("shm:tensor: model 'repeat' has no input 'ßßß")
        assert text.endswith("ßß … (cut)")


def test_a_generation_of_63_bits_is_served(made: HandMade) -> None:
    made.recorded = 2**63 - 2
    made.next()
    assert is_served(made)
