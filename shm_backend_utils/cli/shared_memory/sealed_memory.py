"""Sealed memory, which has no name: found by who has it open or mapped."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ...memory import locks
from ...memory.descriptors import Descriptor
from ...memory.sealed import LINK
from ...memory.shared_file import BLOCK_SIZE
from ...protocol import layout
from .processes import Holder, Identity, Processes, look_into_processes

__all__ = ["SealedMemory", "Search", "find_sealed_memory", "sealed_memory_of"]

_ANY_SIZE: Final = 2**63


@dataclass
class SealedMemory:
    """One sealed region, as found; user and owner are None where nobody has it open, so that nobody can be asked."""

    inode: int  # what tells it from others: it has no name
    byte_size: int  # of all of it; where nobody has it open, of what is mapped
    uid: int | None = None
    is_owner_alive: bool | None = None  # and has not given it up
    slot_count: int = 0
    slots_in_use: int = 0  # a model executes in them at this moment
    # Who has it open or mapped, of those whom this user may look into.
    holders: list[Holder] = field(default_factory=list)


class Search(NamedTuple):
    """What was found, the largest first."""

    found: list[SealedMemory]
    is_complete: bool  # this user may look into every process


def find_sealed_memory(pids: Iterable[int] | None = None) -> Search:
    """Look for this package's sealed memory in processes, all by default, as far as this user may. Changes nothing."""
    return sealed_memory_of(look_into_processes(pids))


def sealed_memory_of(processes: Processes) -> Search:
    """Look for it in processes that were looked into a moment ago."""
    found: dict[Identity, SealedMemory] = {}
    is_complete = not processes.hidden
    for process in processes.found:
        mapped = {each.identity: SealedMemory(each.identity[1], each.byte_size) for each in process.mapped_sealed}
        try:
            seen = {**mapped, **dict(_open(process.folder))}
        except PermissionError:
            is_complete = False
            continue
        except OSError:  # it has ended meanwhile
            continue
        for identity, memory in seen.items():
            known = found.setdefault(identity, memory)
            if known.is_owner_alive is None and memory.is_owner_alive is not None:
                memory.holders = known.holders
                found[identity] = known = memory
            known.holders.append(process.holder)
    return Search(sorted(found.values(), key=lambda each: (-each.byte_size, each.inode)), is_complete)


def _open(folder: Path) -> Iterator[tuple[Identity, SealedMemory]]:
    """Yield what a process has open."""
    for name in os.listdir(folder / "fd"):  # noqa: PTH208  # a Path per descriptor of the machine costs much
        with contextlib.suppress(OSError):  # it is closed by now, or somebody else's, or no memfd
            report = _report(f"{folder}/fd/{name}")
            if report is not None:
                yield report


def _report(link: str) -> tuple[Identity, SealedMemory] | None:
    """Look at what is open there; None if it is nothing of ours.

    Its number may stand for something else the next moment, and to open a device may do something. So a descriptor that
    can do nothing (``O_PATH``) is had first, and it is seen what that is.
    """
    if os.readlink(link) != LINK:  # noqa: PTH115  # as above
        return None
    with contextlib.closing(Descriptor(os.open, link, os.O_PATH | os.O_CLOEXEC)) as place:
        itself = f"/proc/self/fd/{place.fileno()}"
        if os.readlink(itself) != LINK:  # noqa: PTH115
            return None
        opened = Descriptor(os.open, itself, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.closing(opened):
        fd = opened.fileno()
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # raises where a file has a name like ours
        status = os.fstat(fd)
        header = layout.parse_header(os.pread(fd, layout.HEADER_LENGTH, 0), _ANY_SIZE)
        slots = range(0 if header is None else header.slot_count)
        records = [] if header is None else [layout.record_offset(slot, header.record_byte_size) for slot in slots]
        memory = SealedMemory(
            inode=status.st_ino,
            byte_size=status.st_blocks * BLOCK_SIZE,
            uid=status.st_uid,
            is_owner_alive=locks.is_owner_alive(fd),
            slot_count=len(records),
            slots_in_use=sum(locks.is_slot_in_use(fd, record) for record in records),
        )
    return (status.st_dev, status.st_ino), memory
