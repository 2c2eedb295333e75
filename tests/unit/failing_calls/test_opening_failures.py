"""System calls that fail while a model opens a region: no descriptor stays, and no mapping."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.faults.system_calls import INTERRUPT, Failing, Fault
from shm_backend_utils.testing.leak_probe import ShmLeakProbe


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(4096)
    yield region
    region.segment.unlink()
    region.close()


@pytest.mark.parametrize("call", ["open", "fstat", "mmap"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EACCES, INTERRUPT])
def test_nothing_stays_open_whichever_call_fails(region: ManagedRegion, call: str, error: int) -> None:
    happened, after = True, 0
    while happened:
        with ShmLeakProbe(pool_prefix=None), Failing(Fault(call, after, error)) as failing:
            try:
                ManagedRegion.open(region.segment.key, region.header.token.hex(), "region").close()
            except (OSError, ShmError, KeyboardInterrupt):
                assert failing.has_happened
        happened, after = failing.has_happened, after + 1
    assert after > 1


def test_a_process_without_descriptors_is_told_so_and_the_region_is_not_refused(region: ManagedRegion) -> None:
    for call in ("open", "mmap"):
        with Failing(Fault(call, 0, errno.EMFILE)), pytest.raises(ShmError, match="this process has none left"):
            ManagedRegion.open(region.segment.key, region.header.token.hex(), "region")
