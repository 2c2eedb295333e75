"""What a client counts."""

from __future__ import annotations

import threading

import pytest

from shm_backend_utils.client.stats import ClientStats, Tally
from shm_backend_utils.memory.pool.options import PoolStatus

POOL = PoolStatus(held=1, idle=2, quarantined=3, byte_size=4, max_bytes=5)


def stats(tally: Tally) -> ClientStats:
    return tally.stats({}, 0, POOL)


def test_nothing_has_happened_at_first() -> None:
    found = stats(Tally())
    assert (found.requests, found.failures, found.retries, found.bytes_avoided, found.paths) == (0, 0, 0, 0, {})


def test_calls_are_counted_by_their_path() -> None:
    tally = Tally()
    for path in ("direct", "inline", "direct"):
        tally.succeeded(path, 0)
    assert stats(tally).paths == {"direct": 2, "inline": 1}
    assert stats(tally).requests == 3


def test_bytes_that_did_not_cross_the_network_are_added_up() -> None:
    tally = Tally()
    tally.succeeded("direct", 10)
    tally.succeeded("triton-shm", 5)
    assert stats(tally).bytes_avoided == 15


def test_a_call_that_raises_is_a_request_and_a_failure_and_still_raises() -> None:
    tally = Tally()
    with pytest.raises(KeyError), tally.failures():
        raise KeyError
    assert (stats(tally).requests, stats(tally).failures) == (1, 1)


def test_a_call_that_is_interrupted_is_a_failure() -> None:
    tally = Tally()
    with pytest.raises(KeyboardInterrupt), tally.failures():
        raise KeyboardInterrupt
    assert stats(tally).failures == 1


def test_a_call_that_does_not_raise_is_no_failure() -> None:
    tally = Tally()
    with tally.failures():
        tally.succeeded("direct", 0)
    assert (stats(tally).requests, stats(tally).failures) == (1, 0)


def test_retries_are_no_requests_of_their_own() -> None:
    tally = Tally()
    tally.retried()
    assert (stats(tally).retries, stats(tally).requests) == (1, 0)


def test_what_others_keep_is_passed_on() -> None:
    found = Tally().stats({"resize": "direct: nothing stands against it"}, 6, POOL)
    assert found.reasons == {"resize": "direct: nothing stands against it"}
    assert (found.slots_held, found.slots_idle, found.quarantined) == (1, 2, 3)
    assert (found.pool_bytes, found.pool_max_bytes, found.slot_waits) == (4, 5, 6)


def test_figures_that_were_given_do_not_change() -> None:
    tally = Tally()
    before = stats(tally)
    tally.succeeded("direct", 1)
    assert before.paths == {}


def test_threads_lose_no_count() -> None:
    tally = Tally()

    def work() -> None:
        for _ in range(1000):
            tally.succeeded("direct", 2)
            tally.retried()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stats(tally).requests, stats(tally).bytes_avoided, stats(tally).retries) == (4000, 8000, 4000)
