"""What this machine, or container, does to shared memory, whatever server is asked.

It is the client's side that is looked at. Where the server is in another container, it has a ``/dev/shm`` and a limit
of its own, unless both share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...memory import reaper
from ...memory.machine_memory import available_bytes, memory_bytes
from ...memory.shared_file import DEV_SHM, free_bytes, total_bytes
from ..shared_memory.pools import find_pool_files, pools_of
from ..shared_memory.processes import look_into_processes
from ..wording import age, size
from .findings import Finding
from .troubles.machine import (
    DEV_SHM_FULL,
    DEV_SHM_NOT_TMPFS,
    DEV_SHM_NOT_WRITABLE,
    DEV_SHM_SMALL,
    LEFTOVER_POOLS,
    LITTLE_MEMORY,
    NO_DEV_SHM,
    STALE_REGIONS,
)

__all__ = ["findings_on_machine"]

_MIB: Final = 2**20
_SMALL_BYTES: Final = 256 * _MIB  # a container of Docker's has 64 MiB if nobody says otherwise
_FULL_SHARE: Final = 0.9
_ENOUGH_BYTES: Final = 1024 * _MIB  # where so much is free it does not matter what share that is
_LITTLE_BYTES: Final = 128 * _MIB
_MOUNTS: Final = Path("/proc/self/mountinfo")


def findings_on_machine() -> list[Finding]:
    """Look at ``/dev/shm``, at what is left there, and at how much memory there is. Changes nothing.

    Returns
    -------
    list of Finding
        What was met; empty if all is well.
    """
    return [*_dev_shm(), *_left_behind(), *_memory()]


def _dev_shm() -> Iterator[Finding]:
    if not DEV_SHM.is_dir():
        yield Finding(NO_DEV_SHM, f"{DEV_SHM} is not there, or no folder")
        return
    kind = _file_system(DEV_SHM)
    if kind not in ("tmpfs", None):
        yield Finding(DEV_SHM_NOT_TMPFS, f"{DEV_SHM} is on a file system of type {kind}; expected tmpfs")
    if not os.access(DEV_SHM, os.W_OK | os.X_OK):
        yield Finding(DEV_SHM_NOT_WRITABLE, f"user {os.geteuid()} may not write to {DEV_SHM}")
    total, free = total_bytes(), free_bytes()
    if total < _SMALL_BYTES:
        yield Finding(DEV_SHM_SMALL, f"{DEV_SHM} has {size(total)}; expected {size(_SMALL_BYTES)} or more")
    if free < min(total * (1 - _FULL_SHARE), _ENOUGH_BYTES):
        yield Finding(DEV_SHM_FULL, f"{DEV_SHM} has {size(free)} left of {size(total)}")


def _left_behind() -> Iterator[Finding]:
    stale = [region for region in reaper.scan() if not region.is_owner_alive]
    if stale:
        total, oldest = sum(region.byte_size for region in stale), max(region.age_s for region in stale)
        yield Finding(STALE_REGIONS, f"{len(stale)} with {size(total)}, the oldest of them {age(oldest)} old")
    files = find_pool_files()
    pools = [pool for pool in pools_of(files, look_into_processes()) if pool.is_left_behind] if files else []
    if pools:
        total = sum(pool.file.byte_size for pool in pools)
        yield Finding(LEFTOVER_POOLS, f"{len(pools)} of {len(files)}, with {size(total)}")


def _memory() -> Iterator[Finding]:
    left = available_bytes()
    if left < _LITTLE_BYTES:
        yield Finding(LITTLE_MEMORY, f"{size(max(left, 0))} of {size(memory_bytes())} can still be had")


def _file_system(folder: Path) -> str | None:
    """Return the type of the file system that a folder is on; None where the kernel does not tell."""
    place = folder.resolve()
    found: tuple[int, str] | None = None
    try:
        text = _MOUNTS.read_bytes().decode(errors="replace")
    except OSError:
        return None
    # proc_pid_mountinfo(5): the fields after a lonely hyphen begin with the type. What else Python takes for a space,
    # or for the end of a line, may be part of a name.
    for line in filter(None, text.split("\n")):
        fields, _, rest = line.partition(" - ")
        mount = Path(fields.split(" ")[4])
        depth = len(mount.parts)
        if place.is_relative_to(mount) and (found is None or depth >= found[0]):  # a later mount hides an earlier one
            found = depth, rest.split()[0]
    return None if found is None else found[1]
