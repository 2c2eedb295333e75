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
from functools import partial
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


def leak_sealed(stack: ExitStack, *, as_mapping: bool) -> None:
    region = ManagedRegion.create(1, kind=RegionKind.SEALED)
    if as_mapping:
        stack.enter_context(region.buffer())
    else:
        stack.callback(os.close, os.dup(region.segment.fileno()))
    region.close()


LEAKS: dict[Callable[[ExitStack], None], str] = {
    partial(leak_sealed, as_mapping=False): "descriptor of sealed memory, inode [0-9]+",
    partial(leak_sealed, as_mapping=True): "mapping of sealed memory, inode [0-9]+",
    leak_descriptor: "descriptor of /dev/shm/#[0-9]+",
    leak_mapping: "mapping of /dev/shm/#[0-9]+",
    leak_region: "object /dev/shm/shmbu-[0-9a-f-]+",
    leak_test_region: "object /dev/shm/shm_util-[0-9a-f-]+-too",
}


@pytest.mark.parametrize("leak", LEAKS, ids=range(6))
def test_each_kind_of_growth_fails_unless_it_is_given_back(leak: Callable[[ExitStack], None], stack: ExitStack) -> None:
    message = f"^shared memory was left behind: (.*; )?{LEAKS[leak]}: 1 more$"
    with pytest.raises(AssertionError, match=message), ShmLeakProbe(pool_prefix=None):
        leak(stack)
    with ShmLeakProbe(pool_prefix=None), ExitStack() as given_back:
        leak(given_back)


def test_pools_that_grow_fail_by_their_bytes_and_no_others_nor_those_that_shrink_or_stay(own_pools: str) -> None:
    first, second = (SHM / f"{own_pools}{number}" for number in (1, 2))

    def resize(*byte_sizes: int) -> None:
        for pool, byte_size in zip((first, second), byte_sizes, strict=True):
            pool.write_bytes(bytes(byte_size))

    resize(PAGE, 0)
    message = f"bytes of pools /dev/shm/{own_pools}[*]: 1010 more$"
    with pytest.raises(AssertionError, match=message), ShmLeakProbe(own_pools):
        resize(PAGE + 1000, 10)
    with ShmLeakProbe(own_pools):
        resize(PAGE + 999, 10)
    for prefix in (f"{own_pools}of_another_server_", None):
        with ShmLeakProbe(pool_prefix=prefix):
            resize(2 * PAGE, 20)
        resize(PAGE, 10)


def test_it_tells_what_has_grown_since_it_was_made_with_a_block_or_without(own_pools: str, stack: ExitStack) -> None:
    leak_mapping(stack)
    leak_region(stack)
    probe = ShmLeakProbe(own_pools)
    with probe:
        assert not probe.growth()

    def leak_three_things() -> None:
        (SHM / f"{own_pools}1").write_bytes(bytes(10))
        leak_region(stack)
        leak_descriptor(stack)

    with pytest.raises(AssertionError, match="bytes of .*; descriptor of .*; object .*"), probe:
        leak_three_things()
    growth = probe.growth()
    assert repr(probe) == f"<ShmLeakProbe growth={dict(growth)}>"
    assert growth.pop(f"bytes of pools /dev/shm/{own_pools}*") == 10
    assert list(growth.values()) == [1, 1]
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
