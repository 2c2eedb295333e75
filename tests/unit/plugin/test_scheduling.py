"""All files of tests that use the shared server go to the same worker, and each other file to one."""

from __future__ import annotations

import pytest

from tests.scheduling import OneSharedServer


class Config:
    """What a scheduler reads of pytest's configuration: one worker."""

    def getvalue(self, name: str) -> list[str]:
        return ["1*popen"]


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/e2e/test_direct.py::test_it[a::b]", "triton_server"),
        ("tests/e2e/bad_tables/test_table_lies.py::test_it", "triton_server"),
        ("tests/crash/test_client_heals_once.py::test_it", "triton_server"),
        ("tests/server/test_embedded_server.py::test_it", "triton_server"),
        ("tests/crash/test_client_killed.py::test_it", "tests/crash/test_client_killed.py"),
        ("tests/unit/test_url.py::TestIt::test_it", "tests/unit/test_url.py"),
    ],
)
def test_the_scope_of_a_test(nodeid: str, scope: str) -> None:
    assert OneSharedServer(Config())._split_scope(nodeid) == scope
