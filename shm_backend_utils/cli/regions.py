"""List shared memory with its owners; remove the regions of dead processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Final

from ..errors import MachineError
from ..memory import reaper
from ..memory.reaper import RegionReport
from ..memory.registrations import fetch_registrations
from ..memory.shared_file import DEV_SHM
from .shared_memory import (
    BackendPool,
    Processes,
    SealedMemory,
    Search,
    find_pool_files,
    look_into_processes,
    pools_of,
    sealed_memory_of,
)
from .terminal import OWNER, age, printable, size, user

__all__ = ["add_arguments", "run"]

_COLUMNS: Final = "{:<36} {:>9} {:<10} {:<6} {:>9} {:>7}  {}"
_SEALED_COLUMNS: Final = "{:<36} {:>9} {:<10} {:<7} {:>7}  {}"
_POOL_COLUMNS: Final = "{:<69} {:>9} {:<10} {:>7}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--reap", action="store_true", help="remove this user's regions whose owner is dead")
    parser.add_argument("--json", action="store_true", help="print one JSON object per region and line")
    parser.add_argument(
        "--url", metavar="http://HOST:PORT", help="also tell under which names a server has them registered"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the regions, or remove those whose owner is dead; return the exit status."""
    try:
        names = _registered_names(arguments.url) if arguments.url else {}
    except MachineError as error:
        print(f"{arguments.url}: {error}; expected http://HOST:PORT", file=sys.stderr)
        return 1
    try:
        os.scandir(DEV_SHM).close()
    except FileNotFoundError:  # then there are none
        pass
    except OSError as error:
        print(f"{DEV_SHM} cannot be read, so nobody knows what is there: {error.strerror}", file=sys.stderr)
        return 1
    found = reaper.reap() if arguments.reap else reaper.scan()
    # Of the rest nothing is removed. Sealed memory goes with the last process that has it; and a pool that nobody here
    # has mapped may be that of a server which is not seen from here.
    pool_files = [] if arguments.reap else find_pool_files()
    processes = Processes([], []) if arguments.reap else look_into_processes()
    sealed = sealed_memory_of(processes)
    pools = pools_of(pool_files, processes)
    if arguments.json:
        _print_objects(found, names, sealed, pools)
        return 0
    if found:
        print(_COLUMNS.format("REGION", "SIZE", "USER", "OWNER", "AGE", "IN USE", "REGISTERED AS"))
    for report in found:
        print(_row(report, names.get(report.key, [])))
    print(f"{len(found)} removed" if arguments.reap else _summary(found))
    if sealed.found:
        _print_sealed(sealed)
    if pools:
        _print_pools(pools)
    return 0


def _print_objects(
    found: list[RegionReport], names: dict[str, list[str]], sealed: Search, pools: list[BackendPool]
) -> None:
    for report in found:
        print(json.dumps({"kind": "system", **asdict(report), "registered_as": names.get(report.key, [])}))
    for memory in sealed.found:
        holders = [holder._asdict() for holder in memory.holders]
        print(json.dumps({"kind": "sealed", **asdict(memory), "holders": holders}))
    for pool in pools:
        print(json.dumps({"kind": "pool", **pool.facts()}))


def _print_sealed(sealed: Search) -> None:
    print()
    print(_SEALED_COLUMNS.format("SEALED MEMORY", "SIZE", "USER", "OWNER", "IN USE", "HELD BY"))
    for memory in sealed.found:
        print(_sealed_row(memory))
    print(_sealed_summary(sealed))


def _print_pools(pools: list[BackendPool]) -> None:
    """Print those that may be left behind, and how many there are: each instance of a living server has one."""
    print()
    doubtful = [pool for pool in pools if pool.is_left_behind is not False]
    if doubtful:
        print(_POOL_COLUMNS.format("POOL OF TRITON'S PYTHON BACKEND", "SIZE", "USER", "AGE", "MAPPED BY"))
    for pool in doubtful:
        print(_pool_row(pool))
    print(_pool_summary(pools))


def _row(report: RegionReport, names: list[str]) -> str:
    return _COLUMNS.format(
        printable(report.key),
        size(report.byte_size),
        user(report.uid),
        OWNER[report.is_owner_alive],
        age(report.age_s),
        f"{report.slots_in_use}/{report.slot_count}",
        printable(", ".join(names)) or "-",
    )


def _summary(found: list[RegionReport]) -> str:
    dead = sum(not report.is_owner_alive for report in found)
    advice = "; `shm-backend-utils regions --reap` removes this user's" if dead else ""
    regions = "1 region" if len(found) == 1 else f"{len(found)} regions"
    return f"{regions} in /dev/shm, {dead} with a dead owner{advice}"


def _sealed_row(memory: SealedMemory) -> str:
    return _SEALED_COLUMNS.format(
        f"inode {memory.inode}",
        size(memory.byte_size),
        "-" if memory.uid is None else user(memory.uid),
        OWNER[memory.is_owner_alive],
        f"{memory.slots_in_use}/{memory.slot_count}",
        ", ".join(f"{holder.pid} {printable(holder.command)}" for holder in memory.holders),
    )


def _sealed_summary(search: Search) -> str:
    dead = sum(memory.is_owner_alive is False for memory in search.found)
    advice = "; it goes with the processes that hold it" if dead else ""
    rest = "" if search.is_complete else "; processes that this user may not look into may hold more"
    return f"{len(search.found)} sealed, {dead} with a dead owner{advice}{rest}"


def _pool_row(pool: BackendPool) -> str:
    file = pool.file
    holders = "nobody" if pool.is_left_behind else "unknown"
    return _POOL_COLUMNS.format(printable(file.key), size(file.byte_size), user(file.uid), age(file.age_s), holders)


def _pool_summary(pools: list[BackendPool]) -> str:
    left = [pool for pool in pools if pool.is_left_behind]
    advice = "; if no server of another container uses them, remove them from /dev/shm" if left else ""
    return f"{len(pools)} pools of Triton's Python backend, {len(left)} that nobody here has mapped{advice}"


def _registered_names(url: str) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, registration in fetch_registrations(url).items():
        names.setdefault(registration.key.removeprefix("/"), []).append(name)
    return names
