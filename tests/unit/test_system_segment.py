"""POSIX shared memory, against the real /dev/shm."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.access import Access
from shm_backend_utils.memory.segment import SystemSegment

PAGE = mmap.PAGESIZE
PEBIBYTE = 2**50


@pytest.fixture
def key() -> Iterator[str]:
    """A free key; what lies there after the test is removed."""
    key = f"shmbu-{os.getpid()}-{secrets.token_hex(8)}"
    yield key
    path_of(key).unlink(missing_ok=True)


@pytest.fixture
def segment(key: str) -> Iterator[SystemSegment]:
    segment = SystemSegment.create(key, PAGE)
    yield segment
    segment.close()


def path_of(key: str) -> Path:
    return Path("/dev/shm") / key


def refused(key: str, byte_size: int = PAGE) -> str:
    """Return why opening is refused, in a message that names the field and not the key."""
    with pytest.raises(RegionRefusedError) as caught:
        SystemSegment.open(key, byte_size, "regions[0]")
    assert caught.value.field == "regions[0]"
    assert key not in str(caught.value)
    return caught.value.reason


def test_a_new_segment_is_a_file_of_its_size_full_of_zeros(segment: SystemSegment) -> None:
    assert path_of(segment.key).read_bytes() == bytes(PAGE)


def test_a_new_segment_is_its_owners_alone(segment: SystemSegment) -> None:
    assert stat.S_IMODE(path_of(segment.key).stat().st_mode) == 0o600


def test_a_new_segment_has_all_of_its_space_taken(segment: SystemSegment) -> None:
    assert path_of(segment.key).stat().st_blocks * 512 == PAGE


def test_a_segment_knows_what_it_is(segment: SystemSegment) -> None:
    status = path_of(segment.key).stat()
    assert (segment.byte_size, segment.identity) == (PAGE, (status.st_dev, status.st_ino))


def test_a_key_that_is_taken_is_left_alone(segment: SystemSegment) -> None:
    segment.buffer()[0] = 7
    with pytest.raises(FileExistsError):
        SystemSegment.create(segment.key, 2 * PAGE)
    assert path_of(segment.key).read_bytes() == b"\7" + bytes(PAGE - 1)


@pytest.mark.parametrize("byte_size", [PEBIBYTE, 2**63 - 1], ids=["1 PiB", "most"])
def test_more_than_the_machine_has_is_an_error_that_says_how_much_there_is(key: str, byte_size: int) -> None:
    with pytest.raises(MachineError, match=rf"{byte_size} bytes was asked for, but /dev/shm has \d+ free"):
        SystemSegment.create(key, byte_size)


@pytest.mark.parametrize("byte_size", [PEBIBYTE, 0, -1])
def test_a_segment_that_cannot_be_made_leaves_nothing_behind(key: str, byte_size: int) -> None:
    with pytest.raises((MachineError, OSError)):
        SystemSegment.create(key, byte_size)
    assert not path_of(key).exists()


def test_both_sides_see_what_the_other_writes(segment: SystemSegment) -> None:
    other = SystemSegment.open(segment.key, PAGE, "regions[0]")
    segment.buffer()[0] = 1
    other.buffer()[1] = 2
    assert bytes(other.buffer()[:2]) == bytes(segment.buffer()[:2]) == b"\1\2"
    other.close()


def test_a_segment_is_opened_as_a_whole_whatever_is_claimed_of_it(segment: SystemSegment) -> None:
    other = SystemSegment.open(segment.key, 100, "regions[0]")
    assert len(other.buffer()) == other.byte_size == PAGE
    other.close()


def test_a_new_segment_can_be_seen_only_when_it_is_prepared(key: str) -> None:
    seen = []
    SystemSegment.create(key, PAGE, prepare=lambda segment: seen.append(path_of(key).exists())).close()
    assert seen == [False]
    assert path_of(key).exists()


def test_a_segment_whose_preparation_fails_leaves_nothing(key: str) -> None:
    with pytest.raises(ZeroDivisionError):
        SystemSegment.create(key, PAGE, prepare=lambda segment: print(1 / 0))
    assert not path_of(key).exists()


def test_a_key_that_is_taken_stays_its_owners(segment: SystemSegment) -> None:
    with pytest.raises(FileExistsError):
        SystemSegment.create(segment.key, PAGE)
    assert not segment.is_unlinked


def test_other_users_are_let_in_by_mode_and_group(key: str) -> None:
    segment = SystemSegment.create(key, PAGE, access=Access(mode=0o660, group_id=os.getgid()))
    status = path_of(key).stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert status.st_gid == os.getgid()
    segment.close()


def test_prefaulting_changes_no_byte(segment: SystemSegment) -> None:
    segment.buffer()[5] = 7
    segment.prefault()
    assert bytes(segment.buffer()[:8]) == b"\0\0\0\0\0\7\0\0"


def test_two_that_open_the_same_object_find_the_same_identity(segment: SystemSegment) -> None:
    other = SystemSegment.open(segment.key, PAGE, "regions[0]")
    assert other.identity == segment.identity
    other.close()


def test_a_key_that_names_nothing_is_gone(key: str) -> None:
    with pytest.raises(RegionGoneError, match=r"regions\[0\] does not exist .* share /dev/shm") as caught:
        SystemSegment.open(key, PAGE, "regions[0]")
    assert key not in str(caught.value)


def test_a_symbolic_link_is_refused(key: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(bytes(PAGE))
    path_of(key).symlink_to(target)
    assert "symbolic link" in refused(key)


def test_a_fifo_is_refused_without_waiting_for_its_writer(key: str) -> None:
    os.mkfifo(path_of(key))
    assert refused(key) == "it is not a regular shared-memory object"


def test_a_folder_is_refused(key: str) -> None:
    path_of(key).mkdir()
    try:
        assert "cannot open it" in refused(key)
    finally:
        path_of(key).rmdir()


def test_an_object_that_is_smaller_than_claimed_is_refused(segment: SystemSegment) -> None:
    assert refused(segment.key, PAGE + 1) == f"it claims {PAGE + 1} bytes, but {PAGE} are there"


def test_an_unchanged_segment_passes_its_check(segment: SystemSegment) -> None:
    segment.check(PAGE, "regions[0]")
    assert not segment.is_unlinked


def test_a_claim_of_more_than_is_mapped_fails_the_check(segment: SystemSegment) -> None:
    with pytest.raises(RegionRefusedError, match=f"it claims {PAGE + 1} bytes, but {PAGE} are there"):
        segment.check(PAGE + 1, "regions[0]")


def test_a_segment_that_has_grown_is_still_mapped_as_it_was(segment: SystemSegment) -> None:
    os.truncate(path_of(segment.key), 2 * PAGE)
    with pytest.raises(RegionRefusedError, match=f"it claims {2 * PAGE} bytes, but {PAGE} are there"):
        segment.check(2 * PAGE, "regions[0]")


@pytest.mark.parametrize("claimed", [PAGE, 10])
def test_a_truncated_segment_fails_the_check(segment: SystemSegment, claimed: int) -> None:
    os.truncate(path_of(segment.key), 10)
    with pytest.raises(RegionRefusedError, match=f"it claims {claimed} bytes, but 10 are there"):
        segment.check(claimed, "regions[0]")


def test_an_unlinked_segment_fails_the_check(segment: SystemSegment) -> None:
    path_of(segment.key).unlink()
    with pytest.raises(RegionGoneError, match=r"regions\[0\] was removed by its owner"):
        segment.check(PAGE, "regions[0]")
    assert segment.is_unlinked


def test_another_object_under_the_same_key_does_not_pass_for_the_first(segment: SystemSegment) -> None:
    segment.unlink()
    successor = SystemSegment.create(segment.key, PAGE)
    successor.close()
    with pytest.raises(RegionGoneError):
        segment.check(PAGE, "regions[0]")


def test_unlink_removes_the_object(segment: SystemSegment) -> None:
    segment.unlink()
    assert not path_of(segment.key).exists()


def test_unlinking_twice_is_fine(segment: SystemSegment) -> None:
    segment.unlink()
    segment.unlink()
    assert segment.is_unlinked


def test_unlink_works_after_close(segment: SystemSegment) -> None:
    segment.close()
    segment.unlink()
    assert not path_of(segment.key).exists()


def test_unlink_leaves_another_object_under_the_same_key_alone(segment: SystemSegment) -> None:
    path_of(segment.key).unlink()
    path_of(segment.key).write_bytes(b"another")
    segment.unlink()
    assert path_of(segment.key).read_bytes() == b"another"


def test_unlink_leaves_a_symbolic_link_under_the_same_key_alone(segment: SystemSegment) -> None:
    moved = path_of(segment.key).rename(path_of(f"{segment.key}-moved"))
    path_of(segment.key).symlink_to(moved)
    segment.unlink()
    assert path_of(segment.key).is_symlink()
    moved.unlink()


def test_an_array_outlives_close_and_unlink(segment: SystemSegment) -> None:
    array = np.frombuffer(segment.buffer(), np.uint8)
    segment.unlink()
    segment.close()
    array[:] = 5
    assert int(array.sum()) == 5 * PAGE


def test_memory_is_unmapped_when_the_last_array_is_gone(segment: SystemSegment) -> None:
    array = np.frombuffer(segment.buffer(), np.uint8)
    view = array[10:20]
    segment.close()
    del array
    (_, inode) = segment.identity
    assert f" {inode} " in Path("/proc/self/maps").read_text()
    del view
    assert f" {inode} " not in Path("/proc/self/maps").read_text()


def test_closing_twice_is_fine(segment: SystemSegment) -> None:
    segment.close()
    stranger = os.open("/dev/null", os.O_RDONLY)  # takes the number of the descriptor that was closed
    segment.close()
    os.close(stranger)  # fails if the second close has closed it


def test_a_closed_segment_says_so(segment: SystemSegment) -> None:
    segment.close()
    with pytest.raises(ClosedError, match="this shared-memory segment is closed"):
        segment.buffer()


def test_a_closed_segment_fails_its_check(segment: SystemSegment) -> None:
    segment.close()
    with pytest.raises(RegionGoneError, match=r"regions\[0\] was unmapped"):
        segment.check(PAGE, "regions[0]")


def test_a_closed_segment_passes_for_unlinked(segment: SystemSegment) -> None:
    segment.close()
    assert segment.is_unlinked
