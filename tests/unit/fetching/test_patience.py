"""How long users may have a session wait: all of their time at once, and then a tenth of the time that passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.memory.handover.patience import Patience

ALL_S = 1.0
START = 100.0
FREE_S = 0.0101  # and rounding
MOMENT_S = 0.009
ALICE, BOB = 1000, 1001
MOST_AT_ONCE = 5  # four users, and those whom nobody knows


class Clock:
    """Says what time it is, and waits."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patience(clock: Clock) -> Patience:
    return Patience(ALL_S, clock)


def left(patience: Patience, user: int | None) -> float:
    with patience.waiting_for(user) as left_s:
        return left_s


class InVainError(Exception):
    """What was waited for did not come."""


def wait(patience: Patience, clock: Clock, user: int | None, seconds: float = ALL_S) -> float:
    """Wait for so long, or for as long as there is time, in vain, and return how long that was."""
    waited_s = 0.0
    with contextlib.suppress(InVainError), patience.waiting_for(user) as left_s:
        waited_s = min(left_s, seconds)
        clock.wait(waited_s)
        raise InVainError
    return waited_s


def answer(patience: Patience, clock: Clock, user: int, seconds: float) -> None:
    """Have a session wait for so long, and answer then."""
    with patience.waiting_for(user):
        clock.wait(seconds)


def test_what_one_has_used_up_another_one_has(patience: Patience, clock: Clock) -> None:
    wait(patience, clock, ALICE)
    assert left(patience, BOB) == ALL_S
    assert left(patience, None) == ALL_S


def test_a_tenth_of_the_time_comes_back(patience: Patience, clock: Clock) -> None:
    wait(patience, clock, ALICE)
    clock.wait(5.0)
    assert left(patience, ALICE) == pytest.approx(0.5)
    clock.wait(100.0)
    assert left(patience, ALICE) == ALL_S


def test_a_crumb_is_none(patience: Patience, clock: Clock) -> None:
    wait(patience, clock, ALICE)
    clock.wait(0.19)
    assert left(patience, ALICE) == 0
    clock.wait(0.02)
    assert left(patience, ALICE) > 0


def test_who_answers_in_a_moment_loses_nothing_however_often(patience: Patience, clock: Clock) -> None:
    for _ in range(10_000):
        assert wait(patience, clock, ALICE, MOMENT_S) == MOMENT_S
    assert left(patience, ALICE) == ALL_S


def test_who_answers_on_a_busy_machine_loses_nothing_however_often(patience: Patience, clock: Clock) -> None:
    for _ in range(1_000):
        answer(patience, clock, ALICE, ALL_S / 5)
    assert left(patience, ALICE) == ALL_S


def test_who_answers_late_pays_for_all_of_it(patience: Patience, clock: Clock) -> None:
    answer(patience, clock, ALICE, ALL_S / 2)
    assert left(patience, ALICE) == pytest.approx(ALL_S / 2)


def test_who_takes_longer_than_a_moment_in_vain_pays_for_all_of_it(patience: Patience, clock: Clock) -> None:
    wait(patience, clock, ALICE, 2 * MOMENT_S)
    assert left(patience, ALICE) == pytest.approx(ALL_S - 2 * MOMENT_S)


def test_who_hangs_whenever_something_has_come_back_pays_each_time(patience: Patience, clock: Clock) -> None:
    waited_s = 0.0
    for _ in range(1_000):
        waited_s += wait(patience, clock, ALICE)
        clock.wait(0.01)
    assert waited_s <= ALL_S + 0.1 * (clock.now - START)


def test_a_wait_that_raises_counts(patience: Patience, clock: Clock) -> None:
    with contextlib.suppress(KeyboardInterrupt), patience.waiting_for(ALICE):
        clock.wait(ALL_S)
        raise KeyboardInterrupt
    assert left(patience, ALICE) == 0


def test_what_is_refused_at_once_does_not_count(patience: Patience, clock: Clock) -> None:
    wait(patience, clock, ALICE)
    with patience.waiting_for(ALICE):
        clock.wait(5.0)
    assert left(patience, ALICE) == pytest.approx(0.5)


def test_who_waits_twice_at_once_owes_it(patience: Patience, clock: Clock) -> None:
    with patience.waiting_for(ALICE) as first, patience.waiting_for(ALICE) as second:
        assert (first, second) == (ALL_S, ALL_S)
        clock.wait(ALL_S)
    clock.wait(9.0)
    assert left(patience, ALICE) == 0
    clock.wait(10.0)
    assert left(patience, ALICE) == pytest.approx(0.9)


def test_users_without_end_share_one_time_and_are_not_remembered(patience: Patience, clock: Clock) -> None:
    waited = [wait(patience, clock, user) for user in range(1_000)]
    assert sum(waited) <= MOST_AT_ONCE * (ALL_S + 0.1 * (clock.now - START))
    assert waited[:MOST_AT_ONCE] == [ALL_S] * MOST_AT_ONCE
    assert waited.count(0.0) > 900
    clock.wait(1_000.0)
    assert left(patience, 5_000) == ALL_S


def waits(*users: int | None) -> st.SearchStrategy[list[tuple[int | None, float, float]]]:
    """Return a strategy: for whom to wait, how long, and how long not to wait afterwards."""
    return st.lists(st.tuples(st.sampled_from(users), st.floats(0, 3), st.floats(0, 20)), max_size=60)


def waited(every: list[tuple[int | None, float, float]]) -> Iterator[tuple[dict[int | None, float], float]]:
    """Yield who has had a session wait for how long, and for how long they may; a moment each time aside."""
    clock = Clock()
    patience = Patience(ALL_S, clock)
    total: dict[int | None, float] = {}
    for user, seconds, pause_s in every:
        waited_s = wait(patience, clock, user, seconds)
        total[user] = total.get(user, 0.0) + (waited_s if waited_s > FREE_S else 0.0)
        yield total, ALL_S + 0.1 * (clock.now - START) + 1e-6
        clock.wait(pause_s)


@given(waits(None, 1, 2, 3, 4))
def test_nobody_has_more_than_all_of_it_and_a_tenth_of_the_time(every: list[tuple[int | None, float, float]]) -> None:
    for total, most_s in waited(every):
        assert all(each_s <= most_s for each_s in total.values())


@given(waits(None, *range(12)))
def test_many_users_have_together_no_more_than_a_few(every: list[tuple[int | None, float, float]]) -> None:
    for total, most_s in waited(every):
        assert all(each_s <= 2 * most_s for each_s in total.values())  # of his own time, and of the common one
        assert sum(total.values()) <= MOST_AT_ONCE * most_s
