"""The Python backend's own shared memory: a pool for each model instance, which a server that was killed leaves behind.

Nothing in a pool says whose it is. But a living server has its pools mapped, and so has each stub.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...memory.backend_pools import USUAL_PREFIX
from ...memory.shared_file import DEV_SHM
from .processes import Identity, Processes

__all__ = ["BackendPool", "PoolFile", "find_pool_files", "pools_of"]

_TRITON: Final = "triton"
"""What the names of its programs begin with; a server that is part of another program has stubs of such a name, too."""


@dataclass(frozen=True)
class PoolFile:
    """The file of one pool, whose name begins as the backend's do unless its operator says otherwise."""

    key: str
    byte_size: int  # what it takes of /dev/shm: it is made with holes, and grows
    uid: int
    age_s: float  # since it was last written to by a system call, or grew
    identity: Identity


@dataclass(frozen=True)
class BackendPool:
    """One pool of Triton's, as found."""

    file: PoolFile
    pids: list[int]  # who has it mapped, of those whom this user may look into
    # Whether nobody has it mapped; None where that cannot be told, as there is a process of Triton's that this user may
    # not look into. Processes of other PID namespaces are not seen at all.
    is_left_behind: bool | None

    def facts(self) -> dict[str, object]:
        """Return all of that for JSON."""
        facts = asdict(self.file)
        del facts["identity"]
        return {**facts, "pids": self.pids, "is_left_behind": self.is_left_behind}


def find_pool_files() -> list[PoolFile]:
    """Return the pools in ``/dev/shm``, the largest first. To be called *before* processes are looked into.

    A pool that is made later has nobody in a list of processes that is older.
    """
    found = []
    with contextlib.suppress(OSError):  # there is no /dev/shm
        for path in sorted(DEV_SHM.glob(f"{USUAL_PREFIX}*")):
            with contextlib.suppress(OSError):  # it is gone meanwhile
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append(_file_of(path, status))
    return sorted(found, key=lambda file: (-file.byte_size, file.key))


def pools_of(files: Iterable[PoolFile], processes: Processes) -> list[BackendPool]:
    """Return who has pools mapped, of processes that were looked into after the pools were found."""
    is_known = not any(holder.command.startswith(_TRITON) for holder in processes.hidden)
    pids: defaultdict[Identity, list[int]] = defaultdict(list)
    for process in processes.found:
        for each in process.mapped:
            pids[each.identity].append(process.holder.pid)
    return [
        BackendPool(file, pids[file.identity], is_left_behind=False if pids[file.identity] else is_known or None)
        for file in files
    ]


def _file_of(path: Path, status: os.stat_result) -> PoolFile:
    return PoolFile(
        key=path.name,
        byte_size=status.st_blocks * 512,
        uid=status.st_uid,
        age_s=max(0.0, time.time() - status.st_ctime),
        identity=(status.st_dev, status.st_ino),
    )
