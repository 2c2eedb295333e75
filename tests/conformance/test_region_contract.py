"""What every kind of managed region promises, whatever it is made of."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.model.mapping.mapped import MappedRegion
from tests.opened import open_region
from tests.unit.gpu.fakes import wait_until

FIELD: Final = "regions[0]"
SLOTS: Final = 3
MAPS: Final = Path("/proc/self/maps")


def opened(region: ManagedRegion, token: str | None = None) -> ManagedRegion:
    """Open it once more, as a peer does."""
    return open_region(region.segment.key, region.header.token.hex() if token is None else token, FIELD)


def start_peer(region: ManagedRegion, program: str) -> subprocess.Popen[str]:
    """Start another process, which has ``region`` open, and runs a program of Python statements."""
    begin = "import sys\nfrom tests.opened import open_region\nregion = open_region(sys.argv[1], sys.argv[2])\n"
    return start_python(begin + program, region.segment.key, region.header.token.hex())


def start_owner(kind: RegionKind) -> tuple[subprocess.Popen[str], ManagedRegion]:
    """Start a process that makes a region and ends by ``os._exit`` with its input; return both, the region open."""
    process = start_python(
        "import os, sys\n"
        "from shm_backend_utils.memory.managed import ManagedRegion, RegionKind\n"
        f"region = ManagedRegion.create(1000, {SLOTS}, kind=RegionKind.{kind.name})\n"
        "print(region.segment.key, region.header.token.hex(), flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(1)\n"
    )
    key, token = line_of(process).split()
    return process, open_region(key, token, FIELD)


def start_python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(params=[RegionKind.SYSTEM, RegionKind.SEALED])
def kind(request: pytest.FixtureRequest) -> RegionKind:
    kind: RegionKind = request.param
    return kind


@pytest.fixture
def region(kind: RegionKind) -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(1000, SLOTS, kind=kind)
    yield region
    region.segment.unlink()
    region.close()


@pytest.fixture
def peer(region: ManagedRegion) -> Iterator[ManagedRegion]:
    peer = opened(region)
    yield peer
    peer.close()


def test_a_new_region_is_zeros_and_the_same_for_the_peer(region: ManagedRegion, peer: ManagedRegion) -> None:
    assert region.header.slot_count == SLOTS
    assert region.data().nbytes >= 1000
    assert not region.data().any()
    for get in (region.record, region.lease):
        with pytest.raises(IndexError):
            get(SLOTS)
    assert (peer.header, peer.data_offset) == (region.header, region.data_offset)
    assert peer.segment.identity == region.segment.identity


def test_a_region_opens_with_its_token_alone(kind: RegionKind, region: ManagedRegion) -> None:
    """Of sealed ones the protocol's own check has to do: a question has room for a token alone."""
    for token in ("0" * 32, "f" * 32, *(("", "f" * 31, "0" * 64) if kind is RegionKind.SYSTEM else ())):
        with pytest.raises((RegionRefusedError, RegionGoneError)) as refusal:
            opened(region, token)
        assert region.header.token.hex() not in str(refusal.value)


def test_bytes_tables_and_results_cross_processes_both_ways(region: ManagedRegion) -> None:
    region.data()[:4] = [1, 2, 3, 4]
    region.record(2).begin(5, b"table" * 3)
    region.record(1).generation = 5
    program = (
        "region.data()[4:8] = region.data()[:4] * 2\n"
        "record = region.record(2)\nprint(record.generation, bytes(record.request[8:23]).decode())\n"
        "record = region.record(1)\nrecord.start(5)\nrecord.complete(5, b'{}' * 9)\n"
    )
    with start_peer(region, program) as process:
        found, _ = process.communicate()
    assert process.returncode == 0
    assert region.data()[:8].tolist() == [1, 2, 3, 4, 2, 4, 6, 8]
    assert found == "5 tabletabletable\n"
    record = region.record(1)
    assert (record.started, record.completed) == (5, 5)
    assert bytes(record.results)[-record.results_room :][:18] == b"{}" * 9


def test_an_open_peer_is_no_owner(region: ManagedRegion, peer: ManagedRegion) -> None:
    another = opened(region)
    region.close()
    assert peer.is_owner_gone
    another.close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["os._exit", "SIGKILL"])
def test_the_peer_knows_that_the_owner_died_whose_bytes_stay_while_held(kind: RegionKind, is_killed: bool) -> None:
    process, region = start_owner(kind)
    with process, contextlib.closing(region):
        mapped, data = MappedRegion(region), region.data()
        assert (region.is_owner_gone, mapped.is_abandoned) == (False, False)
        if is_killed:
            process.kill()
        process.communicate()
        assert (region.is_owner_gone, mapped.is_abandoned) == (True, True)
        region.segment.unlink()
        data[:] = 5
        assert set(data.tolist()) == {5}


def test_a_slot_is_leased_once(region: ManagedRegion, peer: ManagedRegion) -> None:
    assert region.lease(0).take()
    assert not peer.lease(0).take()
    assert peer.lease(1).take()
    region.lease(0).give_back()
    assert peer.lease(0).take()
    peer.close()
    assert region.lease(0).take()


def test_a_slots_lease_goes_with_the_process_that_held_it(region: ManagedRegion) -> None:
    program = "assert region.lease(2).take()\nprint('taken', flush=True)\nsys.stdin.read()\n"
    with start_peer(region, program) as process:
        assert line_of(process) == "taken"
        assert not region.lease(2).take()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert region.lease(2).take()


def test_arrays_outlive_the_region_whose_memory_goes_with_the_last_one(region: ManagedRegion) -> None:
    peer, inode = opened(region), f" {region.segment.identity[1]} "
    array = region.data()[:40].view(np.uint32)
    region.segment.unlink()
    region.close()
    array[:] = 3
    assert peer.data()[:40].view(np.uint32).sum() == 30
    peer.close()
    assert inode in MAPS.read_text()
    del array
    gc.collect()
    assert inode not in MAPS.read_text()


def test_a_closed_region_says_so(region: ManagedRegion) -> None:
    region.close()
    region.close()
    uses: tuple[Callable[[], object], ...] = (
        region.data,
        region.bytes,
        lambda: region.record(0),
        lambda: region.lease(0),
        region.segment.fileno,
    )
    for use in uses:
        with pytest.raises(ClosedError, match="is closed"):
            use()


def test_the_peer_knows_its_size_and_its_removal(region: ManagedRegion, peer: ManagedRegion) -> None:
    peer.segment.check(peer.header.byte_size, FIELD)
    with pytest.raises(RegionRefusedError):
        peer.segment.check(peer.header.byte_size + 1, FIELD)
    region.segment.unlink()
    with pytest.raises(RegionGoneError):
        peer.segment.check(peer.header.byte_size, FIELD)
    with pytest.raises(RegionGoneError):
        opened(region)


def test_no_descriptor_stays_open(kind: RegionKind) -> None:
    before = count_descriptors()
    region = ManagedRegion.create(1000, SLOTS, kind=kind)
    peer = opened(region)
    region.segment.unlink()
    for each in (region, peer):
        each.close()
    wait_until(lambda: count_descriptors() <= before)  # a thread closes what others may make slow to close


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a Path for each descriptor opens nothing, but costs
