"""Sealed memory, which has no name: found by who has it open or mapped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ..memory import locks
from ..memory.descriptors import Descriptor
from ..memory.sealed import LINK
from ..protocol import layout

__all__ = ["Holder", "SealedMemory", "Search", "find_sealed_memory"]

_PROC: Final = Path("/proc")
_MAPPING: Final = re.compile(
    rf"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) +{re.escape(LINK)}", re.MULTILINE
)
_ANY_SIZE: Final = 2**63

_Identity = tuple[int, int]  # device and inode


class Holder(NamedTuple):
    """A process that has memory open or mapped.

    Attributes
    ----------
    pid : int
    command : str
        The name of its program.
    """

    pid: int
    command: str


@dataclass
class SealedMemory:
    """One sealed region, as found.

    Attributes
    ----------
    inode : int
        What tells it from others: it has no name.
    byte_size : int
        Of all of it; where nobody has it open, of what is mapped.
    uid : int or None
        The user that it belongs to; None where nobody has it open.
    is_owner_alive : bool or None
        Whether its owner lives and has not given it up; None where nobody has it open, so that nobody can be asked.
    slot_count : int
    slots_in_use : int
        Slots that a model executes in at this moment.
    holders : list of Holder
        Who has it open or mapped, of those whom this user may look into.
    """

    inode: int
    byte_size: int
    uid: int | None = None
    is_owner_alive: bool | None = None
    slot_count: int = 0
    slots_in_use: int = 0
    holders: list[Holder] = field(default_factory=list)


class Search(NamedTuple):
    """What was found.

    Attributes
    ----------
    found : list of SealedMemory
        The largest first.
    is_complete : bool
        Whether this user may look into every process.
    """

    found: list[SealedMemory]
    is_complete: bool


def find_sealed_memory(pids: Iterable[int] | None = None) -> Search:
    """Look for sealed memory of this package's in processes, as far as this user may look into them. Changes nothing.

    Parameters
    ----------
    pids : iterable of int, optional
        Which ones; by default all.
    """
    found: dict[_Identity, SealedMemory] = {}
    is_complete = True
    numbers = sorted(int(folder.name) for folder in _PROC.glob("[0-9]*")) if pids is None else pids
    for folder in [_PROC / str(number) for number in numbers]:
        try:
            seen = {**dict(_mapped(folder)), **dict(_open(folder))}
            holder = Holder(int(folder.name), (folder / "comm").read_text(errors="replace").rstrip("\n"))
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
            known.holders.append(holder)
    return Search(sorted(found.values(), key=lambda each: (-each.byte_size, each.inode)), is_complete)


def _open(folder: Path) -> Iterator[tuple[_Identity, SealedMemory]]:
    """Yield what a process has open."""
    for name in os.listdir(folder / "fd"):  # noqa: PTH208  # a Path per descriptor of the machine costs much
        with contextlib.suppress(OSError):  # it is closed by now, or somebody else's, or no memfd
            report = _report(folder / "fd" / name)
            if report is not None:
                yield report


def _report(link: Path) -> tuple[_Identity, SealedMemory] | None:
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
            byte_size=status.st_size,
            uid=status.st_uid,
            is_owner_alive=locks.is_owner_alive(fd),
            slot_count=len(records),
            slots_in_use=sum(locks.is_slot_in_use(fd, record) for record in records),
        )
    return (status.st_dev, status.st_ino), memory


def _mapped(folder: Path) -> Iterator[tuple[_Identity, SealedMemory]]:
    """Yield what a process has mapped: arrays may outlive the descriptor, and the owner."""
    sizes: dict[_Identity, int] = {}
    for found in _MAPPING.finditer((folder / "maps").read_text(errors="replace")):
        begin, end, offset, major, minor = [int(number, 16) for number in found.groups()[:5]]
        identity = os.makedev(major, minor), int(found[6])
        sizes[identity] = max(sizes.get(identity, 0), offset + end - begin)
    for identity, size in sizes.items():
        yield identity, SealedMemory(identity[1], size)
