"""A file that is changed after it was mapped: every request finds out before it touches anything."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.errors import RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping.mapped import MappedRegion, Slot
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.protocol.table import encode
from shm_backend_utils.testing.faults.memory import punch_hole, take_space_beyond
from tests.unit.emulated import message_of
from tests.unit.mapping.files import SHM, TOKEN, managed_file, new_key
from tests.unit.sessions import double
from tests.unit.table_client import Client

PAGE = 4096
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def segment() -> Iterator[SystemSegment]:
    """Four pages, of which the last is a hole."""
    path = SHM / new_key()
    path.write_bytes(bytes(3 * PAGE))
    os.truncate(path, 4 * PAGE)
    segment = SystemSegment.open(path.name, 0, "regions[0]")
    yield segment
    segment.close()
    path.unlink(missing_ok=True)


def path_of(segment: MappedSegment) -> Path:
    return SHM / segment.key


def answer(session: ShmSession, client: Client) -> str:
    """Have a request doubled; return what is wrong with it, or nothing if the answer is right."""
    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], double)
    if response.has_error():
        return message_of(response)
    assert client.output("Y").tolist() == (2 * X).tolist()
    return ""


def test_a_slot_of_a_region_that_has_got_a_hole_is_refused(session: ShmSession, client: Client) -> None:
    assert answer(session, client) == ""
    path = path_of(client.region.segment)
    size = path.stat().st_size
    punch_hole(path.name, size - PAGE, PAGE)
    refusal = f"shm:refused: the request's region refused: its {size} bytes are not there any more: "
    assert answer(session, client) == f"{refusal}it was truncated, or has holes"
    assert client.is_free()


def test_the_last_bytes_of_a_region_that_ends_within_a_block_must_be_there_too() -> None:
    """As a client may make it that is not ours."""
    size = 2 * PAGE + 100
    path = managed_file(new_key("shmbu"), size)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    region = MappedRegion(ManagedRegion.open(path.name, TOKEN.hex(), "r"))
    slot = Slot(region, 0)
    slot.record.begin(1, encode(Table({}, {})))
    slot.claim(1)
    slot.lease.give_back()
    punch_hole(path.name, 2 * PAGE, PAGE)
    with pytest.raises(RegionRefusedError, match=f"its {size} bytes are not there any more"):
        slot.claim(1)
    path.unlink()


def test_a_segment_with_the_holes_that_it_had_passes_its_check(segment: SystemSegment) -> None:
    segment.check(PAGE, "regions[0]")
    assert segment.space == 3 * PAGE


@pytest.mark.parametrize("punched", [0, PAGE], ids=["first", "middle"])
def test_a_segment_with_a_hole_that_it_had_not_fails_its_check(segment: SystemSegment, punched: int) -> None:
    punch_hole(path_of(segment).name, punched, PAGE)
    with pytest.raises(RegionRefusedError, match=f"it had memory for {3 * PAGE} bytes, and now has holes"):
        segment.check(PAGE, "regions[0]")


def test_a_segment_whose_key_went_to_another_file_is_gone_though_it_has_another_name(segment: SystemSegment) -> None:
    path = path_of(segment)
    kept = path.rename(SHM / new_key("kept"))
    path.write_bytes(bytes(4 * PAGE))
    try:
        with pytest.raises(RegionGoneError, match=r"regions\[0\] was replaced by its owner"):
            segment.check(PAGE, "regions[0]")
    finally:
        kept.unlink()


def test_a_slot_of_a_region_truncated_with_space_beyond_its_end_is_refused(session: ShmSession, client: Client) -> None:
    assert answer(session, client) == ""
    path = path_of(client.region.segment)
    size = path.stat().st_size
    os.truncate(path, size - PAGE)
    take_space_beyond(path.name, size, PAGE)
    assert path.stat().st_blocks * 512 >= size
    assert answer(session, client).startswith("shm:refused: ")


# Sealed memory: seals forbid no holes


@pytest.fixture
def sealed() -> Iterator[Client]:
    with contextlib.closing(Client(kind=RegionKind.SEALED)) as client:
        yield client


def punch_sealed(client: Client, offset: int) -> None:
    """Give a page of the region back, as madvise(2) lets everybody who has it mapped."""
    fd = os.open(f"/proc/self/fd/{client.region.segment.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(fd, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, offset, PAGE)
    os.close(fd)


def test_a_request_after_a_hole_in_sealed_memory_is_refused(session: ShmSession, sealed: Client) -> None:
    assert answer(session, sealed) == ""
    punch_sealed(sealed, sealed.region.header.byte_size - PAGE)
    said = answer(session, sealed)
    assert said.startswith("shm:refused: ")
    assert "holes" in said
    assert sealed.is_free()


def test_during_a_request_the_model_reads_zeros_in_a_hole_and_goes_on(session: ShmSession, sealed: Client) -> None:
    def punch_and_double(call: Call) -> None:
        call.input("X")
        punch_sealed(sealed, sealed.data)
        double(call)

    (response,) = session.serve([sealed.request({"X": X + 1}, {"Y": X.nbytes})], punch_and_double)
    assert not response.has_error()
    assert not sealed.output("Y").any()


def test_nobody_can_truncate_sealed_memory(session: ShmSession, sealed: Client) -> None:
    for size in (0, PAGE, sealed.region.header.byte_size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed.region.segment.fileno(), size)
    assert answer(session, sealed) == ""
