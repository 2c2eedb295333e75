"""What memory a pool is told to take, and how much of it where nobody has said how much."""

from __future__ import annotations

from typing import Any

import pytest

from shm_backend_utils.errors import CallerError
from shm_backend_utils.memory.pool import options as module
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName

MACHINE = 10 * 2**30
DEV_SHM = 2**26


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container as docker starts it: much memory, and 64 MiB in /dev/shm."""
    monkeypatch.setattr(module, "memory_bytes", lambda: MACHINE)
    monkeypatch.setattr(module, "total_bytes", lambda: DEV_SHM)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("region", "expected"), [("auto", MACHINE // 2), ("sealed", MACHINE // 2), ("system", DEV_SHM // 2)]
)
def test_the_budget_is_half_of_what_there_is_of_such_memory(region: RegionName, expected: int) -> None:
    assert PoolOptions(region=region).budget_bytes == expected


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("region", ["auto", "sealed", "system"])
def test_a_budget_that_is_said_is_that_one(region: RegionName) -> None:
    assert PoolOptions(region=region, max_bytes=2**20).budget_bytes == 2**20


def test_sealed_memory_is_taken_where_it_can_be() -> None:
    assert PoolOptions().region == "auto"


@pytest.mark.parametrize("wrong", ["memfd", "AUTO", "", None, True])
def test_another_kind_of_memory_is_refused_with_those_that_there_are(wrong: Any) -> None:
    with pytest.raises(CallerError, match=f"PoolOptions.region is {wrong!r}; expected 'auto', 'system', 'sealed'"):
        PoolOptions(region=wrong)


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_have_gone(wanted: Any) -> None:
    with pytest.raises(CallerError, match="huge_pages went with 0.3: all memory has ordinary pages; leave it out"):
        PoolOptions(huge_pages=wanted)
