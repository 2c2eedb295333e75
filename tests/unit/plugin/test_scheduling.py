"""A worker without a server gets files that need none, and ends when there are no more."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from tests.scheduling import TwoServers, uses_the_server

UNIT = ["tests/unit/test_view.py", "tests/unit/test_dtypes.py"]
E2E = ["tests/e2e/test_split.py", "tests/crash/test_gpu_client_killed.py"]


class Config:
    """What a scheduler reads of pytest's configuration."""

    def getvalue(self, name: str) -> list[str]:
        return ["3*popen"]


class Worker:
    """A worker that is told what to run, by the places in its collection."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway, self.told = SimpleNamespace(id=name), list[int]()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_files_of_servers_are_for_two_workers() -> None:
    scheduler: Any = TwoServers(Config())
    first, third = Worker("gw0"), Worker("gw2")
    files = [UNIT[0], *E2E]
    scheduler.workqueue = OrderedDict((file, {file: False}) for file in files)
    scheduler.registered_collections = {first: files, third: files}
    scheduler._assign_work_unit(first)
    scheduler._assign_work_unit(third)
    scheduler._reschedule(third)
    assert (third.told, first.told, third.shutting_down) == ([0], [1], True)
    assert list(scheduler.workqueue) == [E2E[1]]


def test_which_files_need_a_server() -> None:
    assert [uses_the_server(file) for file in (*UNIT, *E2E)] == [False, False, True, True]
