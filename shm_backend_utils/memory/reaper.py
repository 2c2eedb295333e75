"""Find managed regions, and remove those whose owner is proven dead.

The reaper removes only files of this user with this library's prefix, a ready header and a free owner's lease, which
means that the owner is dead or done. An empty file needs no header, but a name of exactly this library's form.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..protocol import layout
from . import locks
from .managed import KEY, KEY_PREFIX
from .shared_file import DEV_SHM, open_by_name

__all__ = ["RegionReport", "reap", "scan"]

_ANY_SIZE: Final = 2**63  # a file may have been truncated since its header was written


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One managed region, as found."""

    key: str
    byte_size: int  # its size in memory; less than its header says if it was truncated
    uid: int
    is_owner_alive: bool
    age_s: float  # since it was made
    slot_count: int
    slots_in_use: int  # the slots in which a model executes at this moment


def scan() -> list[RegionReport]:
    """Return every managed region that this user may look into."""
    return [report for fd, path in _managed_files() if (report := _report(fd, path)) is not None]


def reap() -> list[RegionReport]:
    """Remove this user's regions whose owner is dead, and return their descriptions. Raises nothing."""
    removed = []
    with contextlib.suppress(OSError):  # /dev/shm cannot be listed, without descriptors for example
        for fd, path in _managed_files(os.geteuid()):
            with contextlib.suppress(OSError):
                report = _remove(fd, path)
                if report is not None:
                    removed.append(report)
    return removed


def _remove(fd: int, path: Path) -> RegionReport | None:
    """Remove a region if it is this user's and its owner is proven dead; return its description, None if it stays."""
    if os.fstat(fd).st_uid != os.geteuid() or locks.is_owner_alive(fd):
        return None
    report = _report(fd, path)
    # One reaper at a time: a second one must not remove a new file with the same name.
    if report is None or not locks.exclude_reapers(fd) or not _is_same_file(fd, path):
        return None
    path.unlink()
    return report


def _managed_files(user_id: int | None = None) -> Iterator[tuple[int, Path]]:
    """Yield each file with this library's prefix, opened; it is closed when the next one is requested."""
    for path in sorted(DEV_SHM.glob(f"{KEY_PREFIX}*")):
        with contextlib.suppress(OSError):
            if user_id in (None, path.lstat().st_uid):
                with contextlib.closing(open_by_name(path.name)) as opened:
                    yield opened.fileno(), path


def _report(fd: int, path: Path) -> RegionReport | None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink == 0:  # another process has removed it meanwhile
        return None
    header = layout.parse_header(os.pread(fd, layout.HEADER_LENGTH, 0), _ANY_SIZE)
    if header is None and not (status.st_size == 0 and KEY.fullmatch(path.name)):
        return None
    slot_count = 0 if header is None else header.slot_count
    records = (
        [] if header is None else [layout.record_offset(slot, header.record_byte_size) for slot in range(slot_count)]
    )
    return RegionReport(
        key=path.name,
        byte_size=status.st_size,
        uid=status.st_uid,
        is_owner_alive=locks.is_owner_alive(fd),
        age_s=max(0.0, time.time() - status.st_ctime),
        slot_count=slot_count,
        slots_in_use=sum(locks.is_slot_in_use(fd, record) for record in records),
    )


def _is_same_file(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False
