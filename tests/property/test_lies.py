"""Lies of servers and of models, by every path: each is found out, or may be true, and none ends the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.property.lies.__main__ import PATHS


@pytest.mark.parametrize("path", PATHS)
def test_no_lie_is_believed_and_none_ends_the_process(path: str, request: pytest.FixtureRequest) -> None:
    count: int = request.config.getoption("--lies")
    command = [sys.executable, "-m", "tests.property.lies", path, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == count
    assert outcomes["PeerError"] > count / 2
    assert outcomes["right"] > 0
