"""Memory of this machine: how much a process may have; and POSIX shared memory, against the real /dev/shm."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory import machine
from shm_backend_utils.memory.descriptors import Access
from shm_backend_utils.memory.machine import available_bytes, memory_bytes
from shm_backend_utils.memory.managed import ManagedRegion, array_at
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.protocol import layout
from tests.opened import open_region, open_segment

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEBIBYTE = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of /sys/fs/cgroup; this process is in its group ``pod/container``."""
    own, folder = tmp_path / "own", tmp_path / "groups"
    (folder / "pod" / "container").mkdir(parents=True)
    own.write_text("12:devices:/elsewhere\n0::/pod/container\n")
    monkeypatch.setattr(machine, "_CGROUPS", folder)
    monkeypatch.setattr(machine, "_OWN_CGROUP", own)
    return folder


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the machine says of its memory: as much is available as it has."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {MACHINE // 1024} kB\nMemAvailable:   {MACHINE // 1024} kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", file)
    return file


Limit = tuple[int | str, int, int | None]


def limit(group: Path, most: int | str, used: int = 0, reclaimable: int | None = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    if reclaimable is not None:
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n")


ALL = MACHINE // 1024 * 1024  # what is available without a limit


@pytest.mark.parametrize(
    ("pod", "container", "most", "available"),
    [
        (None, None, MACHINE, ALL),
        (None, (64 * MEBIBYTE, 20 * MEBIBYTE, 0), 64 * MEBIBYTE, 44 * MEBIBYTE),
        ((32 * MEBIBYTE, 30 * MEBIBYTE, 0), (64 * MEBIBYTE, 20 * MEBIBYTE, 0), 32 * MEBIBYTE, 2 * MEBIBYTE),
        ((64 * MEBIBYTE, 60 * MEBIBYTE, 10 * MEBIBYTE), None, 64 * MEBIBYTE, 14 * MEBIBYTE),
        ((MEBIBYTE, 2 * MEBIBYTE, 0), None, MEBIBYTE, -MEBIBYTE),
        ((2 * MACHINE, 0, 0), None, MACHINE, ALL),
        *((None, (nothing, 0, 0), MACHINE, ALL) for nothing in ("max", "", "a word")),
        (None, (MEBIBYTE, 0, None), MACHINE, ALL),
    ],
)
def test_the_least_that_a_group_leaves_counts(
    groups: Path, meminfo: Path, pod: Limit | None, container: Limit | None, most: int, available: int
) -> None:
    for group, said in ((groups / "pod", pod), (groups / "pod" / "container", container)):
        if said is not None:
            limit(group, *said)
    assert (memory_bytes(), available_bytes()) == (most, available)


def test_in_the_root_group_it_is_the_roots_and_pages_may_be_untold(groups: Path, meminfo: Path, tmp_path: Path) -> None:
    """A container sees its own group as the root, and there the limit is; a machine's root has none."""
    limit(groups / "pod", 64 * MEBIBYTE, used=60 * MEBIBYTE)
    (groups / "pod" / "memory.stat").write_text("anon 5\n")
    assert available_bytes() == 4 * MEBIBYTE
    (tmp_path / "own").write_text("0::/\n")
    limit(groups, 16 * MEBIBYTE)
    assert memory_bytes() == 16 * MEBIBYTE


@pytest.mark.parametrize("own", [None, "", "3:memory:/pod/container\n", "0::/../../outside\n"])
def test_without_known_groups_it_is_the_machines(groups: Path, meminfo: Path, tmp_path: Path, own: str | None) -> None:
    limit(groups / "pod" / "container", MEBIBYTE)
    if own is None:
        (tmp_path / "own").unlink()
        limit(groups, MEBIBYTE)
    else:
        (tmp_path / "own").write_text(own)
    assert memory_bytes() == MACHINE


def test_of_this_machine_something_is_told() -> None:
    assert 0 < memory_bytes() <= MACHINE
    assert 0 < available_bytes() < math.inf


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemAvailable: much\n"])
def test_a_machine_that_tells_of_no_available_bytes_has_no_bound(groups: Path, meminfo: Path, text: str | None) -> None:
    if text is None:
        meminfo.unlink()
    else:
        meminfo.write_text(text)
    assert available_bytes() == math.inf


PAGE = mmap.PAGESIZE
PEBIBYTE = 2**50
SHM = Path("/dev/shm")
FIELD = "regions[0]"


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
    return SHM / key


def test_a_new_segment_is_its_owners_alone_full_of_zeros_and_has_its_space_and_key(segment: SystemSegment) -> None:
    status = path_of(segment.key).stat()
    assert path_of(segment.key).read_bytes() == bytes(PAGE)
    assert (stat.S_IMODE(status.st_mode), status.st_blocks * 512) == (0o600, PAGE)
    assert (segment.byte_size, segment.identity) == (PAGE, (status.st_dev, status.st_ino))
    segment.check(PAGE, FIELD)
    assert not segment.is_unlinked
    segment.buffer()[0] = 7
    with pytest.raises(FileExistsError):
        SystemSegment.create(segment.key, 2 * PAGE)
    assert path_of(segment.key).read_bytes() == b"\7" + bytes(PAGE - 1)
    assert not segment.is_unlinked, "it stays its owner's"


@pytest.mark.parametrize("byte_size", [PEBIBYTE, 2**63 - 1, 0, -1])
def test_a_segment_that_cannot_be_made_leaves_nothing_and_says_how_much_there_is(key: str, byte_size: int) -> None:
    with pytest.raises((MachineError, OSError)) as caught:
        SystemSegment.create(key, byte_size)
    if byte_size > 0:
        assert re.search(rf"{byte_size} bytes was asked for, but /dev/shm has \d+ free", str(caught.value))
    assert not path_of(key).exists()


def test_a_new_segment_is_seen_when_it_is_prepared_by_whom_mode_and_group_let_in(key: str) -> None:
    seen, access = [], Access(mode=0o660, group_id=os.getgid())
    prepare = lambda segment: seen.append(path_of(key).exists())  # noqa: E731
    SystemSegment.create(key, PAGE, access=access, prepare=prepare).close()
    assert seen == [False]
    status = path_of(key).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())


def test_a_key_that_names_nothing_is_gone(key: str) -> None:
    with pytest.raises(RegionGoneError, match=r"regions\[0\] does not exist .* share /dev/shm") as caught:
        open_segment(key, PAGE, FIELD)
    assert key not in str(caught.value)


def test_a_claim_of_more_than_is_there_or_mapped_fails_the_check(segment: SystemSegment) -> None:
    for there, claimed, found in ((PAGE, PAGE + 1, PAGE), (2 * PAGE, 2 * PAGE, PAGE), (10, PAGE, 10), (10, 10, 10)):
        os.truncate(path_of(segment.key), there)
        with pytest.raises(RegionRefusedError, match=f"it claims {claimed} bytes, but {found} are there"):
            segment.check(claimed, FIELD)


def test_an_unlinked_segment_fails_the_check_also_if_another_has_its_key(segment: SystemSegment) -> None:
    segment.unlink()
    segment.unlink()
    assert not path_of(segment.key).exists()
    with pytest.raises(RegionGoneError, match=r"regions\[0\] was removed by its owner"):
        segment.check(PAGE, FIELD)
    assert segment.is_unlinked
    SystemSegment.create(segment.key, PAGE).close()
    with pytest.raises(RegionGoneError, match=r"regions\[0\] was replaced by its owner"):
        segment.check(PAGE, FIELD)


def test_unlink_leaves_another_object_under_the_same_key_alone(segment: SystemSegment) -> None:
    moved = path_of(segment.key).rename(path_of(f"{segment.key}-moved"))
    path_of(segment.key).symlink_to(moved)
    segment.unlink()
    assert path_of(segment.key).is_symlink()
    moved.unlink()
    path_of(segment.key).unlink()
    path_of(segment.key).write_bytes(b"another")
    segment.unlink()
    assert path_of(segment.key).read_bytes() == b"another"


def has_free(monkeypatch: pytest.MonkeyPatch, blocks_free: int, blocks: int = 100) -> None:
    said = SimpleNamespace(f_bavail=blocks_free, f_frsize=PAGE, f_blocks=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _: said)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def make(key: str, byte_size: int = PAGE, deadline: float = math.inf) -> None:
    SystemSegment.create(key, byte_size, deadline=deadline).close()


def test_what_is_free_can_be_taken_and_more_takes_nothing_meanwhile(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, 0, 0)  # as a file system without a limit says, and gives some
    make(key)
    path_of(key).unlink()
    has_free(monkeypatch, 1)
    make(key)
    path_of(key).unlink()
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(MachineError, match=f"{PAGE + 1} bytes was asked for"):
        make(key, PAGE + 1)


LACKS = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


@pytest.mark.parametrize("number", [*LACKS, errno.EIO], ids=errno.errorcode.get)
def test_space_that_others_took_is_the_machines_error(key: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    lack, other = r"4096 bytes was asked for, but /dev/shm has \d+ free", "made in /dev/shm: Input/output error; mount"
    with pytest.raises(TimeoutError, match="4096 bytes of shared memory could not be allocated in time"):
        make(key, deadline=time.monotonic() - 1)
    assert not path_of(key).exists()
    with pytest.raises(MachineError, match=lack if number in LACKS else other):
        make(key)


@pytest.fixture
def file(key: str) -> Iterator[SharedFile]:
    """A page, and a hole behind it."""
    path_of(key).write_bytes(bytes(PAGE))
    os.truncate(path_of(key), 2 * PAGE)
    with SharedFile.open(key, FIELD) as file:
        yield file


def test_a_file_has_the_size_and_the_space_that_it_has_and_not_a_byte_more(file: SharedFile) -> None:
    file.check_size(2 * PAGE)
    file.check_space(PAGE)
    with pytest.raises(RegionRefusedError, match=f"claims {2 * PAGE + 1} bytes, but {2 * PAGE} are there"):
        file.check_size(2 * PAGE + 1)
    with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} of its {PAGE + 1} bytes, and holes"):
        file.check_space(PAGE + 1)


@pytest.mark.parametrize("number", [*LACKS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_holes_that_cannot_be_filled_are_told(file: SharedFile, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    lack = r"has holes, and /dev/shm has \d+ bytes free for its 8192; give"
    other = "the server cannot allocate it: Operation not supported"
    with pytest.raises((MachineError, RegionRefusedError), match=lack if number in LACKS else other):
        file.take_space(0, 2 * PAGE)
    file.take_space(PAGE, 0)  # of which the kernel says EINVAL


def test_an_array_at_an_offset_is_a_view(region: ManagedRegion) -> None:
    array = array_at(region.data(), 8, np.dtype(np.float32), (2, 3), 24)
    assert array is not None
    array[1, 2] = 1.5
    assert region.data()[8:32].view(np.float32)[5] == 1.5
    assert array.flags.c_contiguous
    memory = region.data()
    memory.flags.writeable = False
    read_only = array_at(memory, 0, np.dtype(np.float32), (2,), 8)
    assert read_only is not None
    assert not read_only.flags.writeable
    with pytest.raises(TypeError, match="holds pointers"):
        array_at(memory, 0, np.dtype(object), (4,), 64)


def test_what_is_open_is_not_changed_by_a_header_that_is_overwritten(region: ManagedRegion) -> None:
    peer = open_region(region.segment.key, region.header.token.hex(), FIELD)
    region.bytes()[: layout.PAGE_SIZE] = 0xFF
    peer.segment.check(peer.header.byte_size, FIELD)
    assert (peer.header, peer.data_offset) == (region.header, region.data_offset)
    peer.close()
