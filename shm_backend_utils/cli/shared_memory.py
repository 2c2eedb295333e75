"""The shared memory of this machine, and its users: sealed memory, and pools of Triton's Python backend."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ..memory import locks
from ..memory.descriptors import Descriptor
from ..memory.segment import SEALED_LINK
from ..memory.shared_file import BLOCK_SIZE, DEV_SHM, USUAL_POOL_PREFIX
from ..protocol import layout

__all__ = [
    "BackendPool",
    "Process",
    "Processes",
    "SealedMemory",
    "Search",
    "find_pools",
    "look_into_processes",
    "sealed_memory_of",
    "with_users",
]

_PROC: Final = Path("/proc")
_DEV_SHM: Final = "/dev/shm/"
_MAPPING: Final = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) +"
    rf"(?:({re.escape(SEALED_LINK)})$|{_DEV_SHM})"
)

Identity = tuple[int, int]  # a file's device and inode
_ANY_SIZE: Final = 2**63
# The names of Triton's programs begin so; so do those of the stubs of a server that runs inside another program.
_TRITON: Final = "triton"


class Holder(NamedTuple):
    """A process that has memory open or mapped, and the name of its program."""

    pid: int
    command: str


class MappedObject(NamedTuple):
    """Sealed memory, or a file in ``/dev/shm`` of any user, that a process has mapped."""

    identity: Identity
    byte_size: int  # up to the last byte that is mapped
    is_sealed: bool  # it is this package's sealed memory


class Process(NamedTuple):
    """One process, as found."""

    holder: Holder
    folder: Path  # the kernel's files about it
    mapped: list[MappedObject]  # each object once, however often it is mapped


class Processes(NamedTuple):
    """The processes found, in the order of their ids, and those that this user may not look into."""

    found: list[Process]
    hidden: list[Holder]


def look_into_processes() -> Processes:
    """Look at the mappings of all processes, as far as this user may. Changes nothing."""
    found = []
    hidden = []
    for folder in sorted(_PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            holder = Holder(int(folder.name), (folder / "comm").read_text(errors="replace").rstrip("\n"))
            try:
                found.append(Process(holder, folder, _mapped(folder)))
            except PermissionError:
                hidden.append(holder)
    return Processes(found, hidden)


def _mapped(folder: Path) -> list[MappedObject]:
    """Return the objects that a process has mapped: a mapping may outlive the descriptor, and the owner."""
    objects: dict[Identity, MappedObject] = {}
    # File names may have characters at which str.splitlines ends a line; the kernel escapes the newline alone.
    for line in (folder / "maps").read_bytes().decode(errors="replace").split("\n"):
        # The regular expression would take a second for the thousands of other lines.
        found = _MAPPING.match(line) if _DEV_SHM in line or line.endswith(SEALED_LINK) else None
        if found is None:
            continue
        begin, end, offset, major, minor = [int(number, 16) for number in found.groups()[:5]]
        identity = os.makedev(major, minor), int(found[6])
        known = objects.get(identity)
        size = max(0 if known is None else known.byte_size, offset + end - begin)
        objects[identity] = MappedObject(identity, size, is_sealed=found[7] is not None)
    return list(objects.values())


@dataclass
class SealedMemory:
    """One sealed region, as found; user and owner are None if no process has it open."""

    inode: int  # its identity: it has no name
    byte_size: int  # of all of it; of the mapped part where no process has it open
    uid: int | None = None
    is_owner_alive: bool | None = None  # and has not given it up
    slot_count: int = 0
    slots_in_use: int = 0  # a model executes in them at this moment
    # The processes that have it open or mapped, of those that this user may inspect.
    holders: list[Holder] = field(default_factory=list)


class Search(NamedTuple):
    """The findings, the largest first."""

    found: list[SealedMemory]
    is_complete: bool  # this user may look into every process


def sealed_memory_of(processes: Processes) -> Search:
    """Look for this package's sealed memory in processes that were looked into a moment ago. Changes nothing."""
    found: dict[Identity, SealedMemory] = {}
    is_complete = not processes.hidden
    for process in processes.found:
        sealed = [each for each in process.mapped if each.is_sealed]
        mapped = {each.identity: SealedMemory(each.identity[1], each.byte_size) for each in sealed}
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
    """Yield the sealed memory that a process has open."""
    for name in os.listdir(folder / "fd"):  # noqa: PTH208  # a Path per descriptor of the machine costs much
        with contextlib.suppress(OSError):  # it is closed by now, or another user's, or no memfd
            report = _report(f"{folder}/fd/{name}")
            if report is not None:
                yield report


def _report(link: str) -> tuple[Identity, SealedMemory] | None:
    """Look at the open file there; None if it is not ours."""
    if os.readlink(link) != SEALED_LINK:  # noqa: PTH115  # as above
        return None
    # The number may refer to another file the next moment, and opening a device may have side effects.
    with contextlib.closing(Descriptor(os.open, link, os.O_PATH | os.O_CLOEXEC)) as place:
        itself = f"/proc/self/fd/{place.fileno()}"
        if os.readlink(itself) != SEALED_LINK:  # noqa: PTH115
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


class BackendPool(NamedTuple):
    """One pool of Triton's Python backend, found by the usual prefix of its name, which an operator can change."""

    identity: Identity
    key: str
    byte_size: int  # its share of /dev/shm: it is made with holes, and grows
    uid: int
    age_s: float  # since it was last written to by a system call, or grew
    pids: list[int]  # the processes that have it mapped, of those that this user may inspect
    # Whether no process has it mapped; None if that is unknown, because this user may not inspect a process of
    # Triton's. Processes of other PID namespaces are not seen at all.
    is_left_behind: bool | None


def find_pools() -> list[BackendPool]:
    """Return the pools in ``/dev/shm``, the largest first. List processes afterwards, or new pools seem unused."""
    found = []
    with contextlib.suppress(OSError):  # there is no /dev/shm
        for path in DEV_SHM.glob(f"{USUAL_POOL_PREFIX}*"):
            with contextlib.suppress(OSError):  # it is gone meanwhile
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    identity, byte_size = (status.st_dev, status.st_ino), status.st_blocks * BLOCK_SIZE
                    age_s = max(0.0, time.time() - status.st_ctime)
                    found.append(BackendPool(identity, path.name, byte_size, status.st_uid, age_s, [], None))
    return sorted(found, key=lambda pool: (-pool.byte_size, pool.key))


def with_users(pools: Iterable[BackendPool], processes: Processes) -> list[BackendPool]:
    """Return the pools with the processes that have them mapped; list the processes after finding the pools."""
    is_known = not any(holder.command.startswith(_TRITON) for holder in processes.hidden)
    pids: defaultdict[Identity, list[int]] = defaultdict(list)
    for process in processes.found:
        for each in process.mapped:
            pids[each.identity].append(process.holder.pid)
    users = [pids[pool.identity] for pool in pools]
    return [
        pool._replace(pids=its, is_left_behind=False if its else is_known or None)
        for pool, its in zip(pools, users, strict=True)
    ]
