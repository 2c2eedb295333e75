"""What this machine, or container, does to shared memory, whatever server is asked.

It is the client's side that is looked at. Where the server is in another container, it has a ``/dev/shm`` and a limit
of its own, unless both share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from ...memory import reaper
from ...memory.machine_memory import available_bytes, memory_bytes
from ...memory.shared_file import DEV_SHM, free_bytes, total_bytes
from ..shared_memory.pools import find_pool_files, pools_of
from ..shared_memory.processes import look_into_processes
from ..wording import age, size
from .findings import Finding
from .troubles import machine as troubles

__all__ = ["findings_on_machine"]

_MIB: Final = 2**20
_SMALL_BYTES: Final = 256 * _MIB  # a container of Docker's has 64 MiB if nobody says otherwise
_FULL_SHARE: Final = 0.9
_ENOUGH_BYTES: Final = 1024 * _MIB  # where so much is free it does not matter what share that is
_LITTLE_BYTES: Final = 128 * _MIB


def findings_on_machine() -> list[Finding]:
    """Look at ``/dev/shm``, at what is left there, and at how much memory there is. Changes nothing."""
    return [*_dev_shm(), *_left_behind(), *_memory()]


def _dev_shm() -> Iterator[Finding]:
    if not DEV_SHM.is_dir():
        yield Finding(troubles.NO_DEV_SHM, f"{DEV_SHM} is not there, or no folder")
        return
    if not os.access(DEV_SHM, os.W_OK | os.X_OK):
        yield Finding(troubles.DEV_SHM_NOT_WRITABLE, f"user {os.geteuid()} may not write to {DEV_SHM}")
    total, free = total_bytes(), free_bytes()
    if total < _SMALL_BYTES:
        yield Finding(troubles.DEV_SHM_SMALL, f"{DEV_SHM} has {size(total)}; expected {size(_SMALL_BYTES)} or more")
    if free < min(total * (1 - _FULL_SHARE), _ENOUGH_BYTES):
        yield Finding(troubles.DEV_SHM_FULL, f"{DEV_SHM} has {size(free)} left of {size(total)}")


def _left_behind() -> Iterator[Finding]:
    stale = [region for region in reaper.scan() if not region.is_owner_alive]
    if stale:
        total, oldest = sum(region.byte_size for region in stale), max(region.age_s for region in stale)
        yield Finding(troubles.STALE_REGIONS, f"{len(stale)} with {size(total)}, the oldest of them {age(oldest)} old")
    files = find_pool_files()
    pools = [pool for pool in pools_of(files, look_into_processes()) if pool.is_left_behind] if files else []
    if pools:
        total = sum(pool.file.byte_size for pool in pools)
        yield Finding(troubles.LEFTOVER_POOLS, f"{len(pools)} of {len(files)}, with {size(total)}")


def _memory() -> Iterator[Finding]:
    left = available_bytes()
    if left < _LITTLE_BYTES:
        yield Finding(troubles.LITTLE_MEMORY, f"{size(max(left, 0))} of {size(memory_bytes())} can still be had")
