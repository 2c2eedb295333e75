"""Tables at a limit are served, and those beyond cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.server import EmbeddedServer

from ..hand_made import DATATYPES, STEP, Claim, HandMade, Tensor
from ..hand_made import hand_made as made_for
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
    "change",
    [at_the_end_of_the_region, without_a_gap, in_the_other_order, with_bytes_behind_the_table],
)
def test_what_is_at_a_limit_is_served(made: HandMade, change: Break) -> None:
    change(made)
    assert is_served(made)


def test_inputs_may_be_the_same_bytes(triton_server: EmbeddedServer) -> None:
    with made_for(triton_server.grpc_url, "adder", {"A": X, "B": X}, {"SUM": X.nbytes}) as request:
        request.table["B"].offset = request.table["A"].offset
        request.infer()
        assert request.output("SUM", np.float32).tolist() == (2 * X).tolist()


def test_a_record_of_the_largest_size_has_room_for_the_longest_name(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        assert is_served(request)
        request.next()
        request.table.length = (1 << 19) + 1
        with pytest.raises(InferenceServerException, match="shm:table: length: found 524289, expected 32 to 524288"):
            request.infer()
        request.table.length = None
        request.table["X"].name = b"X" * 65535
        with pytest.raises(InferenceServerException, match="shm:tensor: model 'repeat' has no input 'XXX"):
            request.infer()


MANY: Final = [f"{index:08x}".encode() for index in range(13_000)]


def many_inputs(request: HandMade, count: int) -> None:
    request.table.inputs = [Tensor(name, 2 << 20, 0, 0, DATATYPES["FP32"], [0]) for name in MANY[:count]]


def many_outputs(request: HandMade, count: int) -> None:
    request.table.outputs = [Tensor(name, 2 << 20, 0) for name in MANY[: count - 1]]


def many_regions(request: HandMade, count: int) -> None:
    request.table.regions = [Claim(3, name) for name in MANY[:count]]


@pytest.mark.parametrize(
    ("fill", "count"),
    [
        (many_inputs, 512),
        (many_outputs, 512),
        (many_regions, 64),
        *[(fill, 13_000) for fill in (many_inputs, many_outputs, many_regions)],
    ],
)
def test_the_largest_lie_costs_next_to_nothing(
    triton_server: EmbeddedServer, fill: Callable[[HandMade, int], None], count: int
) -> None:
    """In a record of the largest size there is room for more than ten thousand tensors, which no model has."""
    with valid(triton_server.grpc_url, record_byte_size=1 << 20, tensor_count=512) as request:
        fill(request, count)
        request.write()
        took = []
        for _ in range(9):
            before = time.perf_counter()
            with pytest.raises(InferenceServerException, match="shm:(table|tensor|gone): "):
                request.send()
            took.append(time.perf_counter() - before)
        assert sorted(took)[4] < 0.02


def test_the_longest_name_is_told_as_far_as_an_error_goes(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        request.table["X"].name = "ß".encode() * 32_000
        (status, text), (_, over_http) = refusals_of(request, triton_server)
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text == over_http
        assert text.startswith("shm:tensor: model 'repeat' has no input 'ßßß")
        assert text.endswith("ßß … (cut)")
