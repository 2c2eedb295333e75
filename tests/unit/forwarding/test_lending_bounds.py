"""Which arrays lie in memory that may be lent, to the byte; and which models take it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model import Call
from shm_backend_utils.model.forward.direct import Lending, LentMemory
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.protocol.claims import LentRegionClaim, NamedRegionClaim
from shm_backend_utils.protocol.spans import MAX_TENSORS
from tests.unit.forwarding.two_models import X, config, two_models
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

WHOLE = np.zeros(64, np.uint8)
PART = WHOLE[16:48]
"""What is lent."""


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(PoolOptions(max_bytes=1 << 20))
    yield pool
    pool.close()


@pytest.fixture
def lending(pool: SlotPool) -> Lending:
    lent = LentMemory(NamedRegionClaim("r"), HostMemory(WHOLE, begin=16, byte_size=32), ((0, 32),))
    return Lending([None, lent], pool)


@pytest.mark.parametrize(("begin", "end", "offset"), [(0, 32, 0), (0, 1, 0), (31, 32, 31), (8, 24, 8)])
def test_what_lies_inside_is_lent(lending: Lending, begin: int, end: int, offset: int) -> None:
    assert lending.place_of(PART[begin:end]) == (1, offset)
    assert lending.claims == [NamedRegionClaim("r")]


@pytest.mark.parametrize(
    "array",
    [WHOLE[15:17], WHOLE[15:16], WHOLE[47:49], WHOLE[48:49], WHOLE[16:49], PART[::2], PART[:0], X],
    ids=[
        "across the beginning",
        "before",
        "across the end",
        "behind",
        "larger",
        "not contiguous",
        "empty",
        "elsewhere",
    ],
)
def test_what_does_not_lie_inside_is_not_lent(lending: Lending, array: Any) -> None:
    assert lending.place_of(array) is None
    assert lending.claims == []


@pytest.mark.parametrize(("begin", "end", "is_lent"), [(0, 8, True), (16, 32, True), (4, 16, False), (8, 16, False)])
def test_of_a_region_only_the_calls_own_tensors_are_lent(pool: SlotPool, begin: int, end: int, is_lent: bool) -> None:
    lent = LentMemory(NamedRegionClaim("r"), HostMemory(WHOLE, begin=16, byte_size=32), ((0, 8), (16, 32)))
    assert bool(Lending([lent], pool).place_of(PART[begin:end])) is is_lent


def test_memory_of_a_gpu_is_not_looked_for_on_the_host(lending: Lending) -> None:
    assert lending.place_of(SimpleNamespace(nbytes=4, flags=SimpleNamespace(c_contiguous=True))) is None


def test_memory_that_earlier_calls_hold_is_lent_from_first_byte_to_last(lending: Lending, pool: SlotPool) -> None:
    region, memory = pool.redeem(pool.request(Need(100), "test"))
    assert lending.place_of(memory) == (1, 0)
    assert lending.place_of(memory[-1:]) == (1, region.byte_size - 1)
    assert lending.place_of(memory[10:20]) == (1, 10)
    assert lending.place_of(memory[::2]) is None
    (claim,) = lending.claims
    assert isinstance(claim, LentRegionClaim)
    assert claim.key == region.key
    lending.memories.clear()  # they keep it mapped


# Which models


def many_tensors() -> dict[str, Any]:
    found = config("other", "direct,triton-shm")
    found["input"] += [tensor(f"X{number}") for number in range(MAX_TENSORS)]
    return found


@pytest.mark.parametrize(
    ("other", "paths"),
    [
        (config("other"), ["direct"]),
        (config("other", "triton-shm"), ["triton"]),
        (config("other", ""), ["triton"]),
        (many_tensors(), ["triton"]),
        (config("other", model_transaction_policy={"decoupled": True}), []),
    ],
    ids=["declared", "another path", "undeclared", "too many tensors", "decoupled"],
)
def test_memory_is_lent_to_models_that_take_it(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], paths: list[str]
) -> None:
    client, found = Client(), []

    def answer(call: Call) -> None:
        found.append(call.path)
        call.put("Y", call.input("X"))

    with two_models(monkeypatch, other) as models:
        models.answer = answer if paths else None
        models.serve(client, lambda call: call.put("Y", call.forward("other", {"X": call.input("X")}, {"Y": 16})["Y"]))
    assert found == paths
    client.close()
