"""Which memory still is as it was poisoned, and what is chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.model.debug import Poison, _least_that_tells

ITEM_SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("item_size", ITEM_SIZES)
@pytest.mark.parametrize("count", [0, 40, 3_000_001])
def test_all_that_was_not_written_is_left(item_size: int, count: int) -> None:
    data = np.zeros(item_size * count, np.uint8)
    poison = Poison(data)
    assert poison.left(item_size) == count


@pytest.mark.parametrize("item_size", ITEM_SIZES)
def test_nothing_is_left_of_what_was_written_whatever_with(item_size: int) -> None:
    data, other = np.zeros((2, item_size * 3_000_000), np.uint8)
    Poison(other)  # two poisons are two
    for value in (0, 1, 255, np.random.default_rng(1).integers(0, 256, len(data), np.uint8), other):
        poison = Poison(data)
        data[:] = value
        assert poison.left(item_size) == 0


@given(st.sampled_from((4, 8)), st.integers(1, 1000), st.data())
def test_one_element_of_four_bytes_and_more_is_found(item_size: int, count: int, data: st.DataObject) -> None:
    memory = np.zeros(item_size * count, np.uint8)
    poison = Poison(memory)
    at = data.draw(st.integers(0, count - 1)) * item_size
    before = memory[at : at + item_size].copy()
    memory[:] = ~memory
    memory[at : at + item_size] = before
    assert poison.left(item_size) == 1


@pytest.mark.parametrize(("expected", "least"), [(1e-9, 1), (4 / 256, 4), (10 / 256, 4), (100_000 / 256, 500)])
def test_how_many_are_no_chance(expected: float, least: int) -> None:
    assert _least_that_tells(expected) == least
