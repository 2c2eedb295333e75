"""A stub knows what the Python backend's pools are called, by its own command line."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from shm_backend_utils.memory.backend_pools import USUAL_PREFIX, is_pool, prefix_of_pools

FIND = "from shm_backend_utils.memory.backend_pools import prefix_of_pools; print(prefix_of_pools())"
STUB = "/opt/tritonserver/backends/python/triton_python_backend_stub"


def found_by_a_stub(pool: str, program: str = STUB) -> str:
    """Return the prefix that a process finds which was started as the backend starts a stub."""
    # Python takes a script where a stub has its model, and then the pool's name.
    command = [program, "/dev/stdin", pool, "1048576", "1048576", "1", "/opt/backends", "336", "model"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # of which the other name tells nothing
    done = subprocess.run(
        command, executable=sys.executable, env=environment, input=FIND, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize("prefix", [USUAL_PREFIX, f"{USUAL_PREFIX}0123_", "mine_", "7", ""])
def test_a_stub_finds_what_comes_before_its_pools_uuid(prefix: str) -> None:
    assert found_by_a_stub(f"{prefix}{uuid.uuid4()}") == prefix


def test_a_stub_of_an_old_release_finds_what_comes_before_its_pools_number() -> None:
    assert found_by_a_stub("mine_12") == "mine_"


def test_who_is_no_stub_or_was_told_something_else_takes_the_usual_one() -> None:
    assert prefix_of_pools() == USUAL_PREFIX
    assert found_by_a_stub(f"mine_{uuid.uuid4()}", program="/usr/bin/python3") == USUAL_PREFIX
    assert found_by_a_stub("what is that") == USUAL_PREFIX


def test_what_only_begins_alike_is_no_pool_unless_it_begins_as_usual() -> None:
    assert is_pool(f"mine_{uuid.uuid4()}", "mine_")
    assert not is_pool("mine_other", "mine_")
    assert not is_pool(f"other_{uuid.uuid4()}", "mine_")
    assert is_pool(f"{USUAL_PREFIX}whatever", "mine_")
