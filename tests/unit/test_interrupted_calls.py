"""An interrupt between any two bytecodes of a call: nothing is wrong afterwards, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.managed import RegionKind
from shm_backend_utils.memory.pool import inventory
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.address import parse_address
from shm_backend_utils.testing.faults.system_calls import Interrupts
from shm_backend_utils.testing.harness import ModelHarness
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.checked_calls import Call, infer, prepare, stream, submit
from tests.opened import open_region

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(shm_backend_utils.__file__).parent
INTERRUPTS = Interrupts(
    *(PACKAGE / folder for folder in ("client", "memory", "protocol", "tensors")),
    *PACKAGE.glob("*.py"),
)
LONG_S = 20.0


@pytest.fixture(scope="module")
def harness() -> Iterator[ModelHarness]:
    folder = ROOT / "model_repository"
    with ModelHarness.in_child(folder / "identity", folder / "frames") as harness:
        yield harness


@pytest.fixture
def _healing_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost counts as such sooner. What is raised in a finalizer is swallowed by Python: nobody keeps it."""
    monkeypatch.setattr(inventory, "_LOST_S", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def client_of(harness: ModelHarness) -> ShmClient:
    return ShmClient(harness, timeout_s=LONG_S, pool=PoolOptions(max_bytes=2**26), inline_bytes=0)


def steps(every: int) -> Iterator[int]:
    """Yield the numbers of bytecodes, until a call comes to its end without an interrupt."""
    step = 1
    while step == 1 or INTERRUPTS.where:
        yield step
        step += every


def becomes_so(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return so


def is_empty(client: ShmClient) -> bool:
    """Return whether the pool has nothing, after what is lost was found and what is idle has gone."""
    pool = cast(Any, client)._memory.pool
    pool._keep_house()
    pool.drop_idle()
    return (pool.status.held, pool.status.idle, pool.status.quarantined, pool.status.byte_size) == (0, 0, 0, 0)


ALL = pytest.mark.long


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "new memory"])
@pytest.mark.parametrize(
    ("call", "every"),
    [
        *((call, 97) for call in (infer, submit, prepare)),
        (stream, 499),
        *(pytest.param(call, 1, marks=ALL) for call in (infer, submit, prepare)),
        pytest.param(stream, 7, marks=ALL),
    ],
)
@pytest.mark.timeout(600)
def test_an_interrupt_of_a_call_loses_nothing(harness: ModelHarness, call: Call, every: int, is_warm: bool) -> None:
    with client_of(harness) as client:
        assert call(client)
        assert is_empty(client)
        probe = ShmLeakProbe(None)
        for step in steps(every):
            assert call(client), INTERRUPTS.where
            if not is_warm:
                assert becomes_so(lambda: is_empty(client))
            INTERRUPTS.at(step, lambda: call(client))
            gc.collect()
            assert becomes_so(lambda: is_empty(client)), INTERRUPTS.where
            assert becomes_so(lambda: not probe.growth()), (INTERRUPTS.where, probe.growth())


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("is_asked_again", [True, False])
@pytest.mark.parametrize("kind", RegionKind)
def test_an_interrupt_leaves_a_region_that_a_model_can_open(kind: RegionKind, is_asked_again: bool) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**20))) as pool:
        for step in steps(3):
            region, memory = pool.take_granted(pool.request(Need(2**12, kind=kind), INTERRUPTS.where))
            address = parse_address(region.slots[0].address_pattern % "m")
            with contextlib.closing(open_region(address.key, address.token, INTERRUPTS.where)) as opened:
                assert opened.header.byte_size == region.byte_size == region.data_end
            end = region.data_end + 2**12
            INTERRUPTS.at(step, functools.partial(pool.grow, region, end))
            if is_asked_again:
                assert pool.grow(region, end)
                assert np.frombuffer(region.buffer, np.uint8).nbytes == region.data_end == end
            del region, memory
            gc.collect()
            if is_asked_again:
                pool.drop_idle()
        pool.drop_idle()
        assert becomes_so(lambda: pool.status.byte_size == 0)


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("every", [pytest.param(997, id="some"), pytest.param(13, id="many", marks=ALL)])
@pytest.mark.parametrize("call", [infer, submit, prepare, stream])
@pytest.mark.timeout(600)
def test_an_interrupt_of_the_only_call_leaves_nothing(harness: ModelHarness, call: Call, every: int) -> None:
    with client_of(harness) as another:
        assert call(another)

        def only_call() -> None:
            with client_of(harness) as client:
                assert call(client)

        probe, threads = ShmLeakProbe(None), threading.active_count()
        for step in steps(every):
            INTERRUPTS.at(step, only_call)
            gc.collect()
            assert becomes_so(lambda: not probe.growth()), (INTERRUPTS.where, probe.growth())
            assert becomes_so(lambda: threading.active_count() <= threads), INTERRUPTS.where
            assert call(another), INTERRUPTS.where
