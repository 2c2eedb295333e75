"""The bench's parts: what it sends, how it counts, and what it says of limits."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from scripts.tools.bench.groups.own_time import functions_called
from scripts.tools.bench.groups.throughput import rate_of_threads
from scripts.tools.bench.random_requests import RandomRequests
from scripts.tools.bench.reports import COLUMNS, as_json, cells_of
from scripts.tools.figures import Figure
from shm_backend_utils.client import Result
from shm_backend_utils.dtypes import from_numpy


def test_a_rate_is_of_all_threads_each_beginning_elsewhere() -> None:
    together = threading.Barrier(3)
    firsts: list[int] = []

    def call(x: int) -> None:
        if len(firsts) < 3:
            firsts.append(x)
            together.wait(5)

    with ThreadPoolExecutor(3) as pool:
        assert rate_of_threads(pool, call, list(range(100)), threads=3, seconds=0.5) > 3
    assert len(set(firsts)) == 3


def test_a_call_that_fails_ends_the_measurement() -> None:
    def call(x: int) -> None:
        raise AssertionError("a wrong answer")

    with ThreadPoolExecutor(2) as pool, pytest.raises(AssertionError, match="a wrong answer"):
        rate_of_threads(pool, call, [1], threads=2, seconds=60)  # not waited for


def test_a_period_that_is_over_at_once_has_a_call_of_each_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert rate_of_threads(pool, lambda x: None, [1], threads=1, seconds=0) > 0


def test_functions_of_the_package_are_counted_once_and_no_others() -> None:
    def work() -> None:
        for _ in range(2):
            from_numpy(np.dtype(np.float32), "x")
            json.dumps([1])

    assert "dtypes:from_numpy" in functions_called(work)
    assert functions_called(lambda: json.dumps([1])) == []


class Forgetful:
    """A client whose model adds nothing."""

    def infer(self, model: str, inputs: dict[str, Any], **named: Any) -> Result:
        return Result({f"Y{name[1:]}": array for name, array in inputs.items()}, "direct", lambda: None)


def test_wrong_answers_to_requests_at_random_are_counted() -> None:
    requests = RandomRequests(Forgetful())  # type: ignore[arg-type]
    requests.send(50)
    assert requests.answers == 50
    assert requests.wrong > 20


FIGURES = [
    Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2),
    Figure("two", 0.5, "× another", "1 ms / 2 ms", at_least=1.0),
    Figure("three", 3.0, "µs", "measured alone"),
]


def test_a_row_says_whether_its_limit_is_held() -> None:
    holds = COLUMNS.index("holds")
    assert [cells_of(figure)[holds] for figure in FIGURES] == ["yes", "no", ""]
    assert [as_json(figure)["holds"] for figure in FIGURES] == [True, False, None]
