"""What is to be forsaken in children is found while other threads make more of it, and let go of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shm_backend_utils.forks import forsake_in_children, owners_of_kind


class Owned:
    def forsake(self) -> None:
        pass


@pytest.mark.usefixtures("switching_often")
def test_owners_are_found_while_others_come_and_go() -> None:
    def come_and_go(_: int) -> None:
        for _ in range(2000):
            forsake_in_children(Owned())

    kept = Owned()
    forsake_in_children(kept)
    with ThreadPoolExecutor(4) as threads:
        coming = [threads.submit(come_and_go, number) for number in range(3)]
        while not all(each.done() for each in coming):
            assert kept in owners_of_kind(Owned)
    for each in coming:
        each.result()
    assert owners_of_kind(Owned) == [kept]
