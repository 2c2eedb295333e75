"""Threads at once, and what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["side_by_side"]


def side_by_side(*works: Callable[[], object]) -> None:
    """Run functions in a thread each, all of which begin together, and raise what one of them has raised."""
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
