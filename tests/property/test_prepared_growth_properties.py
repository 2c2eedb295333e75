"""Prepared calls whose outputs have any sizes, in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm_backend_utils.client import PoolOptions, Result
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

pytestmark = pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")

OUTPUTS = ("OUT0", "OUT1")
HEAD_ROOM = PoolOptions().head_room
COUNTS = st.one_of(st.integers(0, 50), st.integers(0, 5_000), st.integers(0, 50_000))
ROOMS = st.none() | st.integers(0, 10_000)


def counted(_: Order, inputs: Arrays) -> Arrays:
    first, second = inputs["IN0"].tolist()
    return {"OUT0": np.arange(first, dtype=np.int32), "OUT1": np.arange(second, dtype=np.int32) + 7}


def is_right(result: Result, counts: tuple[int, int]) -> bool:
    return all(np.array_equal(result[f"OUT{n}"], np.arange(count) + 7 * n) for n, count in enumerate(counts))


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(COUNTS, COUNTS, st.booleans()), min_size=1, max_size=8),
    hints=st.tuples(ROOMS, ROOMS),
    budget=st.sampled_from([2**16, 2**19, 2**26]),
)
def test_every_output_is_right_and_what_fits_overflows_no_more(
    pairs: list[tuple[int, int, bool]], hints: tuple[int | None, int | None], budget: int
) -> None:
    is_ample = budget == 2**26
    rooms, learned, lacking = [hint or 0 for hint in hints], [0, 0], False
    kept: list[Result] = []
    with (
        FakeServer(config("m", dtype="TYPE_INT32", count=2), compute=counted) as server,
        client_of(server, pool=PoolOptions(max_bytes=budget)) as client,
    ):
        with client.prepare("m", {"IN0": ((2,), np.int32)}, outputs=dict(zip(OUTPUTS, hints, strict=True))) as call:
            for *counts, keep in pairs:
                call.inputs["IN0"][:] = counts
                result = call.infer()
                assert is_right(result, (counts[0], counts[1]))
                if lacking:
                    rooms = [max(room, known) for room, known in zip(rooms, learned, strict=True)]
                too_large = [4 * count > room for count, room in zip(counts, rooms, strict=True)]
                if is_ample:
                    assert [name in result.overflowed for name in OUTPUTS] == too_large
                lacking = any(too_large)
                for n, (count, overflows) in enumerate(zip(counts, too_large, strict=True)):
                    if overflows:
                        learned[n] = max(learned[n], math.ceil(4 * count * HEAD_ROOM))
                if keep:
                    kept.append(result)
                assert client.stats().pool_bytes <= budget
            del result
        kept.clear()
        assert client.stats().slots_held == client.stats().quarantined == 0
