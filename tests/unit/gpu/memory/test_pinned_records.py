"""Slot records that streams use: registered once for each mapping, and no longer when nobody can use them any more."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.gpu.memory.pinned import PinnedRecords
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.gpu.fakes import DRIVER, MODEL, collect_all, held_back, in_forked_child, stream_on

SLOTS = 3


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(1, SLOTS)
    yield region
    region.segment.unlink()
    region.close()


def pinned() -> int:
    return DRIVER.live(MODEL).pinned


def write(gpu: CudaRuntime, region: ManagedRegion, slot: int, value: int, device: int) -> None:
    address = PinnedRecords.of(gpu, region).completed(slot, device)
    assert address is not None
    with stream_on(gpu, device) as stream, gpu.on(device):
        gpu.write_word(address, value, stream)


def test_streams_of_every_gpu_write_completed_of_every_slot(gpu: CudaRuntime, region: ManagedRegion) -> None:
    for slot in range(SLOTS):
        for device in range(2):
            write(gpu, region, slot, 10 * slot + device, device)
            assert region.record(slot).completed == 10 * slot + device
    assert [region.record(slot).started for slot in range(SLOTS)] == [0] * SLOTS
    assert (DRIVER.count("cuMemHostRegister"), pinned()) == (2, 1)  # the second finds the memory registered


def test_threads_register_once(gpu: CudaRuntime, region: ManagedRegion) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: PinnedRecords.of(gpu, region).completed(0, 0), range(40)))
    assert (len(set(found)), pinned()) == (1, 1)


def test_memory_that_somebody_else_has_registered_stays_so(gpu: CudaRuntime, region: ManagedRegion) -> None:
    whole = region.bytes()
    gpu.pin(whole.ctypes.data, whole.nbytes)
    write(gpu, region, 0, 7, 0)
    region.close()
    collect_all(gpu)
    assert pinned() == 1
    gpu.unpin(whole.ctypes.data)


def test_an_interrupt_leaves_no_registration(gpu: CudaRuntime, region: ManagedRegion, monkeypatch: Any) -> None:
    def pin(address: int, byte_size: int) -> None:
        CudaRuntime.pin(gpu, address, byte_size)
        raise KeyboardInterrupt

    records = PinnedRecords.of(gpu, region)
    monkeypatch.setattr(gpu, "pin", pin)
    with pytest.raises(KeyboardInterrupt):
        records.completed(0, 0)
    del records
    region.close()
    gc.collect()
    collect_all(gpu)
    assert pinned() == 0


def test_records_of_a_closed_region_are_half_made(gpu: CudaRuntime, region: ManagedRegion) -> None:
    region.close()
    with pytest.raises(ClosedError):
        PinnedRecords.of(gpu, region)
    gc.collect()  # its finalizer says nothing


@pytest.mark.parametrize("way", ["grow", "close"])
def test_a_mapping_that_ends_is_unregistered_when_gpus_are_done(
    gpu: CudaRuntime, region: ManagedRegion, way: str
) -> None:
    address = PinnedRecords.of(gpu, region).completed(0, 1)
    assert address is not None
    kept = region.bytes()
    with stream_on(gpu, 1) as stream:
        with held_back(stream):
            with gpu.on(1):
                gpu.write_word(address, 5, stream)
            region.grow(2**20) if way == "grow" else region.close()
            gc.collect()
            gpu.retired.collect_soon()
            time.sleep(0.05)
            assert (gpu.retired.is_waiting, pinned()) == (True, 1)
        gpu.synchronize_stream(stream, 1)
    collect_all(gpu)
    assert pinned() == 0
    assert np.count_nonzero(kept == 5) >= 1
    if way == "grow":
        write(gpu, region, 0, 6, 1)
        assert region.record(0).completed == 6


def test_a_forked_child_unregisters_nothing(gpu: CudaRuntime, region: ManagedRegion) -> None:
    write(gpu, region, 0, 7, 0)

    def let_go() -> None:
        region.close()
        gc.collect()
        assert not gpu.retired.is_waiting

    in_forked_child(let_go)
    write(gpu, region, 0, 8, 0)
    assert region.record(0).completed == 8
