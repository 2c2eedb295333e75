"""Who has shared memory mapped: all processes that this user may look into, each looked at once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ...memory.sealed import LINK

__all__ = ["Holder", "Identity", "MappedObject", "Process", "Processes", "look_into_processes"]

_PROC: Final = Path("/proc")
_DEV_SHM: Final = "/dev/shm/"
_MAPPING: Final = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) +"
    rf"(?:({re.escape(LINK)})$|{_DEV_SHM})"
)

Identity = tuple[int, int]
"""A file's device and inode."""


class Holder(NamedTuple):
    """A process that has memory open or mapped, and the name of its program."""

    pid: int
    command: str


class MappedObject(NamedTuple):
    """What a process has mapped of sealed memory, or of a file in ``/dev/shm``, whoever that belongs to."""

    identity: Identity
    byte_size: int  # up to the last byte that is mapped
    is_sealed: bool  # it is sealed memory of this package's


class Process(NamedTuple):
    """One process, as found."""

    holder: Holder
    folder: Path  # what the kernel tells of it
    mapped: list[MappedObject]  # each object once, however often it is mapped

    @property
    def mapped_sealed(self) -> list[MappedObject]:
        """What of that is sealed memory."""
        return [each for each in self.mapped if each.is_sealed]


class Processes(NamedTuple):
    """The processes found, in the order of their ids, and those that this user may not look into."""

    found: list[Process]
    hidden: list[Holder]


def look_into_processes(pids: Iterable[int] | None = None) -> Processes:
    """Look at what processes have mapped, all by default, as far as this user may. Changes nothing."""
    found = []
    hidden = []
    numbers = sorted(int(folder.name) for folder in _PROC.glob("[0-9]*")) if pids is None else pids
    for folder in [_PROC / str(number) for number in numbers]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            holder = Holder(int(folder.name), (folder / "comm").read_text(errors="replace").rstrip("\n"))
            try:
                found.append(Process(holder, folder, _mapped(folder)))
            except PermissionError:
                hidden.append(holder)
    return Processes(found, hidden)


def _mapped(folder: Path) -> list[MappedObject]:
    """Return what a process has mapped: arrays may outlive the descriptor, and the owner."""
    objects: dict[Identity, MappedObject] = {}
    # Names of files may have all that Python takes for the end of a line; the kernel escapes one alone.
    for line in (folder / "maps").read_bytes().decode(errors="replace").split("\n"):
        # There are thousands of other lines, of which the regular expression would take a second.
        found = _MAPPING.match(line) if _DEV_SHM in line or line.endswith(LINK) else None
        if found is None:
            continue
        begin, end, offset, major, minor = [int(number, 16) for number in found.groups()[:5]]
        identity = os.makedev(major, minor), int(found[6])
        known = objects.get(identity)
        size = max(0 if known is None else known.byte_size, offset + end - begin)
        objects[identity] = MappedObject(identity, size, is_sealed=found[7] is not None)
    return list(objects.values())
