"""A /dev/shm that is too small: an error that names it, its size and the ways out; or another path, if any will do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import BudgetError, NoSharedMemoryError, PoolOptions, Result, ShmClient
from shm_backend_utils.memory.pool.pool import SlotPool
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

PAGE = 4096
TOTAL = 20 * PAGE
X = np.ones(2**18, np.float32)
NEEDED = 1056768
WAYS_OUT = "give /dev/shm more room (docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted at /dev/shm)"
SYSTEM = PoolOptions(region="system")


@pytest.fixture(autouse=True)
def small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_bavail=16, f_blocks=20, f_frsize=PAGE)
    monkeypatch.setattr(os, "statvfs", lambda _: space)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("rows", dims="1024", max_batch_size=4)) as server:
        yield server


HAS = f"bytes of shared memory, but /dev/shm has {TOTAL}, of which the pool may have {8 * PAGE}"
TOO_LITTLE: dict[str, tuple[PoolOptions, int, type[Exception], str]] = {
    "for the call": (
        SYSTEM,
        2**18,
        NoSharedMemoryError,
        f"the call needs {NEEDED} {HAS}; {WAYS_OUT}, or send less at once",
    ),
    "as the pool's part": (
        SYSTEM,
        10240,
        NoSharedMemoryError,
        f"the call needs {12 * PAGE} {HAS}; {WAYS_OUT}, raise PoolOptions(max_bytes=...), or send less at once",
    ),
    "for the budget": (
        PoolOptions(region="system", max_bytes=2**30),
        2**18,
        NoSharedMemoryError,
        f"shared memory of {NEEDED} bytes was asked for, but /dev/shm has {16 * PAGE} free of {TOTAL}; {WAYS_OUT}, or "
        "take less of it: release results sooner, or lower PoolOptions(max_bytes=...)",
    ),
    "as the user's budget": (
        PoolOptions(max_bytes=8 * PAGE),
        10240,
        BudgetError,
        f"the call needs {12 * PAGE} bytes of shared memory, but the pool may have {8 * PAGE}; raise "
        "PoolOptions(max_bytes=...), or send less at once",
    ),
}


@pytest.mark.parametrize("what", TOO_LITTLE)
@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_memory_is_too_little(server: FakeServer, path: Any, what: str) -> None:
    pool, count, kind, text = TOO_LITTLE[what]
    with client_of(server, pool=pool) as client, pytest.raises(kind) as error:
        client.infer("m", {"IN0": X[:count]}, path=path)
    assert str(error.value) == text


def test_one_without_a_limit_has_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=PAGE))
    pool = SlotPool(SYSTEM)
    assert 0 < pool.status.max_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    pool.close()


def inferred(client: ShmClient) -> Result:
    return client.infer("m", {"IN0": X})


def submitted(client: ShmClient) -> Result:
    return client.submit("m", {"IN0": X}).result()


def prepared(client: ShmClient) -> Result:
    with client.prepare("m", {"IN0": (X.shape, X.dtype)}) as call:
        call.inputs["IN0"][...] = X
        return call.infer()


@pytest.mark.parametrize("budget", [None, 2**30])
@pytest.mark.parametrize("call", [inferred, submitted, prepared])
def test_a_call_for_which_any_path_will_do_goes_inline(
    server: FakeServer, caplog: pytest.LogCaptureFixture, budget: int | None, call: Callable[[ShmClient], Result]
) -> None:
    pool = PoolOptions(region="system", max_bytes=budget)
    with client_of(server, pool=pool) as client, caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = call(client)
            assert result.path == "inline"
            assert result["OUT0"].shape == X.shape
            assert (result["OUT0"] == 2).all()
        with client.infer("m", {"IN0": X[:10]}) as result:
            assert result.path == "direct"
    told = [record.getMessage() for record in caplog.records if "takes the path inline" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("a call of model 'm' takes the path inline: ")
    assert WAYS_OUT in told[0]


def test_a_split_batch_goes_in_parts_and_no_memory_is_needed_for_calls_side_by_side(server: FakeServer) -> None:
    with client_of(server, pool=PoolOptions(region="system", max_bytes=2**30)) as client:
        result = client.infer("rows", {"IN0": np.ones((50, 1024), np.float32)}, split=True)
        assert (result["OUT0"] == 2).all()
        assert len(server.orders) >= 13
    server.configs["rows"] = config("rows", dims="2048", max_batch_size=8, dynamic_batching={})
    with client_of(server, pool=SYSTEM) as client, client.prepare("rows", {"IN0": ((1, 2048), np.float32)}) as call:
        assert call.path == "direct"


def test_a_model_that_takes_nothing_inline_gets_the_error(server: FakeServer) -> None:
    server.configs["m"]["parameters"]["SHM_PATHS"]["string_value"] = "direct,triton-shm"
    with client_of(server, pool=SYSTEM) as client, pytest.raises(NoSharedMemoryError, match="but /dev/shm has"):
        client.infer("m", {"IN0": X})
