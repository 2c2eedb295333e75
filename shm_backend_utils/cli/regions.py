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
    Search,
    find_pools,
    look_into_processes,
    sealed_memory_of,
    with_users,
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
        "--url", metavar="http://HOST:PORT", help="also show the names under which this server has registered them"
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
        print(f"{DEV_SHM} cannot be read, so its regions are unknown: {error.strerror}", file=sys.stderr)
        return 1
    found = reaper.reap() if arguments.reap else reaper.scan()
    # --reap removes regions only. Sealed memory ends with the last process that holds it, and a pool that no process
    # here has mapped may belong to a server that is not visible from here.
    pools = [] if arguments.reap else find_pools()
    processes = Processes([], []) if arguments.reap else look_into_processes()
    sealed = sealed_memory_of(processes)
    pools = with_users(pools, processes)
    if arguments.json:
        _print_objects(found, names, sealed, pools)
        return 0
    _print_regions(found, names)
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
        facts = pool._asdict()
        del facts["identity"]
        print(json.dumps({"kind": "pool", **facts}))


def _print_regions(found: list[RegionReport], names: dict[str, list[str]]) -> None:
    if found:
        print(_COLUMNS.format("REGION", "SIZE", "USER", "OWNER", "AGE", "IN USE", "REGISTERED AS"))
    for report in found:
        in_use, owner = f"{report.slots_in_use}/{report.slot_count}", OWNER[report.is_owner_alive]
        known_as = printable(", ".join(names.get(report.key, []))) or "-"
        words = size(report.byte_size), user(report.uid), owner, age(report.age_s), in_use, known_as
        print(_COLUMNS.format(printable(report.key), *words))


def _print_sealed(sealed: Search) -> None:
    print()
    print(_SEALED_COLUMNS.format("SEALED MEMORY", "SIZE", "USER", "OWNER", "IN USE", "HELD BY"))
    for memory in sealed.found:
        in_use, owner = f"{memory.slots_in_use}/{memory.slot_count}", OWNER[memory.is_owner_alive]
        holders = ", ".join(f"{holder.pid} {printable(holder.command)}" for holder in memory.holders)
        words = size(memory.byte_size), "-" if memory.uid is None else user(memory.uid), owner, in_use, holders
        print(_SEALED_COLUMNS.format(f"inode {memory.inode}", *words))
    dead = sum(memory.is_owner_alive is False for memory in sealed.found)
    hint = "; it goes with the processes that hold it" if dead else ""
    rest = "" if sealed.is_complete else "; processes that this user may not inspect may hold more"
    print(f"{len(sealed.found)} sealed, {dead} with a dead owner{hint}{rest}")


def _print_pools(pools: list[BackendPool]) -> None:
    """Print the pools that may be left behind, and the number of all: each instance of a running server has one."""
    print()
    doubtful = [pool for pool in pools if pool.is_left_behind is not False]
    if doubtful:
        print(_POOL_COLUMNS.format("POOL OF TRITON'S PYTHON BACKEND", "SIZE", "USER", "AGE", "MAPPED BY"))
    for pool in doubtful:
        words = user(pool.uid), age(pool.age_s), "no process" if pool.is_left_behind else "unknown"
        print(_POOL_COLUMNS.format(printable(pool.key), size(pool.byte_size), *words))
    left = sum(pool.is_left_behind is True for pool in pools)
    hint = "; if no server of another container uses them, remove them from /dev/shm" if left else ""
    print(f"pools of Triton's Python backend: {len(pools)}, {left} not mapped by any process here{hint}")


def _summary(found: list[RegionReport]) -> str:
    dead = sum(not report.is_owner_alive for report in found)
    hint = "; `shm-backend-utils regions --reap` removes this user's" if dead else ""
    regions = "1 region" if len(found) == 1 else f"{len(found)} regions"
    return f"{regions} in /dev/shm, {dead} with a dead owner{hint}"


def _registered_names(url: str) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, registration in fetch_registrations(url).items():
        names.setdefault(registration.key.removeprefix("/"), []).append(name)
    return names
