"""Threads that switch at every step, and what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

Run = Callable[..., None]


@pytest.fixture
def side_by_side(switching_often: None) -> Run:
    """Run functions in a thread each, which switch as often as they can, and raise what one of them has raised."""

    def run(*works: Callable[[], object]) -> None:
        errors: list[BaseException] = []
        gate = threading.Barrier(len(works))

        def guarded(work: Callable[[], object]) -> None:
            try:
                gate.wait()
                work()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return run
