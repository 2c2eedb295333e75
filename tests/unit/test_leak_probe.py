"""The probe finds each kind of growth, names it, and is silent about all else."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.compat.shm_regions import SystemShmHandle
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.managed import KEY_PREFIX, ManagedRegion, RegionKind
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.testing import leak_probe
from shm_backend_utils.testing.leak_probe import POOL_PREFIX, ShmLeakProbe

SHM = Path("/dev/shm")
PAGE = 4096


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_probe, "_PATIENCE_S", 0.3)


@pytest.fixture
def own_pools() -> Iterator[str]:
    """A prefix of pools that no server has."""
    prefix = f"{POOL_PREFIX}test_{os.getpid()}_{secrets.token_hex(4)}_"
    yield prefix
    for pool in SHM.glob(f"{prefix}*"):
        pool.unlink()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test leaks on purpose, given back when it has seen what it wanted."""
    with ExitStack() as stack:
        yield stack


def leak_descriptor(stack: ExitStack) -> None:
    fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR)
    stack.callback(os.close, fd)


def leak_mapping(stack: ExitStack) -> None:
    file = Descriptor(os.open, SHM, os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(file.fileno(), PAGE)
    segment = SystemSegment("", file, PAGE)
    stack.enter_context(segment.buffer())
    segment.close()


def leak_region(stack: ExitStack) -> None:
    path = SHM / f"{KEY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    path.write_text("no header")  # else a client that starts meanwhile would remove it, as its owner's lock is free
    stack.callback(path.unlink)


def leak_test_region(stack: ExitStack) -> None:
    handle = SystemShmHandle("leaked", PAGE)
    path = SHM / handle.key.removeprefix("/")
    other_name = path.with_name(f"{path.name}-too")
    path.rename(other_name)
    handle.destroy()
    stack.callback(other_name.unlink)


def leak_sealed_descriptor(stack: ExitStack) -> None:
    region = ManagedRegion.create(1, kind=RegionKind.SEALED)
    stack.callback(os.close, os.dup(region.segment.fileno()))
    region.close()


def leak_sealed_mapping(stack: ExitStack) -> None:
    region = ManagedRegion.create(1, kind=RegionKind.SEALED)
    stack.enter_context(region.buffer())
    region.close()


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (leak_sealed_descriptor, "^shared memory was left behind: descriptor of sealed memory, inode [0-9]+: 1 more$"),
        (leak_sealed_mapping, "mapping of sealed memory, inode [0-9]+: 1 more$"),
        (leak_descriptor, "^shared memory was left behind: descriptor of /dev/shm/#[0-9]+: 1 more$"),
        (leak_mapping, "mapping of /dev/shm/#[0-9]+: 1 more$"),
        (leak_region, "^shared memory was left behind: object /dev/shm/shmbu-[0-9a-f-]+: 1 more$"),
        (leak_test_region, "^shared memory was left behind: object /dev/shm/shm_util-[0-9a-f-]+-too: 1 more$"),
    ],
)
def test_each_kind_of_growth_of_this_process_fails(
    leak: Callable[[ExitStack], None], message: str, stack: ExitStack
) -> None:
    with pytest.raises(AssertionError, match=message), ShmLeakProbe(pool_prefix=None):
        leak(stack)


def test_pools_that_grow_fail_by_their_bytes(own_pools: str) -> None:
    (SHM / f"{own_pools}1").write_bytes(bytes(PAGE))

    def grow() -> None:
        (SHM / f"{own_pools}1").write_bytes(bytes(PAGE + 1000))
        (SHM / f"{own_pools}2").write_bytes(bytes(10))

    message = f"bytes of pools /dev/shm/{own_pools}[*]: 1010 more$"
    with pytest.raises(AssertionError, match=message), ShmLeakProbe(own_pools):
        grow()


def test_pools_that_shrink_or_stay_are_no_growth_nor_are_others(own_pools: str) -> None:
    pools = [SHM / f"{own_pools}{number}" for number in range(2)]
    for pool in pools:
        pool.write_bytes(bytes(PAGE))
    with ShmLeakProbe(own_pools):
        pools[0].write_bytes(bytes(PAGE - 1))
        pools[1].write_bytes(bytes(PAGE))
    for prefix in (f"{own_pools}of_another_server_", None):
        with ShmLeakProbe(pool_prefix=prefix):
            pools[0].write_bytes(bytes(2 * PAGE))
        pools[0].write_bytes(bytes(PAGE))


def test_what_is_given_back_in_the_block_is_no_growth(own_pools: str) -> None:
    with ShmLeakProbe(own_pools), ExitStack() as stack:
        leak_descriptor(stack)
        leak_mapping(stack)
        leak_region(stack)
        leak_test_region(stack)
        leak_sealed_descriptor(stack)
        leak_sealed_mapping(stack)


def test_what_was_there_before_is_no_growth_and_all_that_has_grown_since_is_named(stack: ExitStack) -> None:
    leak_descriptor(stack)
    leak_mapping(stack)
    leak_region(stack)
    probe = ShmLeakProbe(pool_prefix=None)
    with probe:
        pass

    def leak_two_things() -> None:
        leak_region(stack)
        leak_descriptor(stack)

    with pytest.raises(AssertionError, match="descriptor of .*; object .*"), probe:
        leak_two_things()


def test_without_a_block_it_tells_what_has_grown_since_it_was_made(own_pools: str, stack: ExitStack) -> None:
    probe = ShmLeakProbe(own_pools)
    assert not probe.growth()
    (SHM / f"{own_pools}1").write_bytes(bytes(10))
    leak_region(stack)
    growth = probe.growth()
    assert repr(probe) == f"<ShmLeakProbe growth={dict(growth)}>"
    assert growth.pop(f"bytes of pools /dev/shm/{own_pools}*") == 10
    assert list(growth.values()) == [1]
    stack.close()
    (SHM / f"{own_pools}1").unlink()
    assert not probe.growth()


def test_what_a_thread_is_about_to_close_is_no_leak() -> None:
    """So it is with the copy that was handed to a model: it may have answered before the thread goes on."""
    with ShmLeakProbe(pool_prefix=None):
        late = Descriptor(os.open, SHM, os.O_TMPFILE | os.O_RDWR)
        closing = threading.Timer(0.1, late.close)
        closing.start()
    closing.join()


def test_an_error_in_an_event_loop_keeps_no_memory_of_who_runs_it(caplog: pytest.LogCaptureFixture) -> None:
    def run_a_loop() -> weakref.ref[object]:
        memory = np.zeros(3)

        def fails() -> None:
            raise RuntimeError("an event of another loop")

        async def lets_it_fail() -> None:
            asyncio.get_running_loop().call_soon(fails)
            await asyncio.sleep(0)

        asyncio.run(lets_it_fail())
        return weakref.ref(memory)

    memory = run_a_loop()
    gc.collect()  # asyncio's own frame and the error refer to each other
    assert memory() is None
    assert "RuntimeError: an event of another loop" in caplog.text
