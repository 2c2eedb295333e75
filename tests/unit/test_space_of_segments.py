"""The space of a segment: asked for before it is taken, taken in time, and the machine's fault where there is none."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory import mapped_segment as module
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile

PAGE = 4096
SHM = Path("/dev/shm")
FIELD = "regions[1]"


@pytest.fixture
def key() -> Iterator[str]:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    yield key
    (SHM / key).unlink(missing_ok=True)


def has_free(monkeypatch: pytest.MonkeyPatch, blocks_free: int, blocks: int = 100) -> None:
    said = SimpleNamespace(f_bavail=blocks_free, f_frsize=PAGE, f_blocks=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _: said)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def make(key: str, byte_size: int = PAGE, deadline: float = math.inf) -> None:
    SystemSegment.create(key, byte_size, deadline=deadline).close()


def test_the_last_page_that_is_free_can_be_taken(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, 1)
    make(key, PAGE)


def test_a_file_system_without_a_limit_says_that_it_has_no_blocks_and_gives_some(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_free(monkeypatch, 0, 0)
    make(key, PAGE)


def test_what_there_is_no_room_for_takes_nothing_from_others_meanwhile(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    has_free(monkeypatch, 1)
    monkeypatch.setattr(os, "posix_fallocate", lambda *piece: taken.append(piece))
    with pytest.raises(MachineError, match=f"{PAGE + 1} bytes was asked for"):
        make(key, PAGE + 1)
    assert taken == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG], ids=errno.errorcode.get)
def test_space_that_somebody_else_has_taken_meanwhile_is_an_error_of_the_machine(
    key: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    with pytest.raises(MachineError, match=r"4096 bytes was asked for, but /dev/shm has \d+ free"):
        make(key)


def test_another_failure_than_a_lack_of_space_is_not_said_to_be_one(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        make(key)


def test_space_that_cannot_be_taken_in_time_is_not_taken(key: str) -> None:
    with pytest.raises(TimeoutError, match="4096 bytes of shared memory could not be made in time"):
        make(key, deadline=time.monotonic() - 1)
    assert not (SHM / key).exists()


def test_a_segment_is_prefaulted_until_a_moment_and_not_longer(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PREFAULT_PIECE", PAGE)
    advised: list[int] = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            advised.append(start)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    with contextlib.closing(SystemSegment.create(key, 3 * PAGE)) as segment:
        segment.prefault(time.monotonic() - 1)
        assert advised == []
        segment.prefault(time.monotonic() + 60)
        assert advised == [0, PAGE, 2 * PAGE]


# Of files that somebody else made


@pytest.fixture
def file(key: str) -> Iterator[SharedFile]:
    """A page, and a hole behind it."""
    (SHM / key).write_bytes(bytes(PAGE))
    os.truncate(SHM / key, 2 * PAGE)
    with SharedFile.open(key, FIELD) as file:
        yield file


def test_a_file_has_the_size_and_the_space_that_it_has_and_not_a_byte_more(file: SharedFile) -> None:
    file.check_size(2 * PAGE)
    file.check_space(PAGE)
    with pytest.raises(RegionRefusedError, match=f"claims {2 * PAGE + 1} bytes, but {2 * PAGE} are there"):
        file.check_size(2 * PAGE + 1)
    with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} bytes of {PAGE + 1}, and else holes"):
        file.check_space(PAGE + 1)


def test_of_no_bytes_no_space_is_taken(file: SharedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EINVAL))  # so says the kernel
    file.take_space(PAGE, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG], ids=errno.errorcode.get)
def test_holes_that_cannot_be_filled_are_an_error_of_the_machine(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    with pytest.raises(MachineError, match=r"has holes, and /dev/shm has \d+ bytes free for its 8192; give"):
        file.take_space(0, 2 * PAGE)


def test_a_file_whose_space_cannot_be_taken_for_another_reason_is_refused(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    with pytest.raises(RegionRefusedError, match="the server cannot take its space: Operation not supported"):
        file.take_space(0, 2 * PAGE)
