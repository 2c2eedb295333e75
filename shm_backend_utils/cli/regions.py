"""``shm-backend-utils regions``: what shared memory there is, whose it is; and the removal of what the dead left."""

from __future__ import annotations

import argparse
import json
import pwd
import sys
from dataclasses import asdict
from typing import Any, Final

from ..errors import MachineError
from ..memory import reaper
from ..memory.reaper import RegionReport
from ..memory.registrations import fetch_registrations
from .sealed_memory import SealedMemory, Search, find_sealed_memory

__all__ = ["add_command"]

_COLUMNS: Final = "{:<36} {:>9} {:<10} {:<6} {:>9} {:>7}  {}"
_SEALED_COLUMNS: Final = "{:<36} {:>9} {:<10} {:<7} {:>7}  {}"
_OWNER: Final = {True: "alive", False: "dead", None: "unknown"}


def add_command(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("regions", help="list our shared-memory regions", description=__doc__)
    parser.add_argument("--reap", action="store_true", help="remove this user's regions whose owner is dead")
    parser.add_argument("--json", action="store_true", help="print one JSON object per region and line")
    parser.add_argument(
        "--url", metavar="http://HOST:PORT", help="also tell under which names a server has them registered"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        names = _registered_names(arguments.url) if arguments.url else {}
    except MachineError as error:
        print(f"{arguments.url}: {error}; expected http://HOST:PORT", file=sys.stderr)
        return 1
    found = reaper.reap() if arguments.reap else reaper.scan()
    # Nothing of it is ever left to be removed: it goes with the last process that has it.
    sealed = Search([], is_complete=True) if arguments.reap else find_sealed_memory()
    if arguments.json:
        for report in found:
            print(json.dumps({"kind": "system", **asdict(report), "registered_as": names.get(report.key, [])}))
        for memory in sealed.found:
            holders = [holder._asdict() for holder in memory.holders]
            print(json.dumps({"kind": "sealed", **asdict(memory), "holders": holders}))
        return 0
    if found:
        print(_COLUMNS.format("REGION", "SIZE", "USER", "OWNER", "AGE", "IN USE", "REGISTERED AS"))
    for report in found:
        print(_row(report, names.get(report.key, [])))
    print(f"{len(found)} removed" if arguments.reap else _summary(found))
    if sealed.found:
        print()
        print(_SEALED_COLUMNS.format("SEALED MEMORY", "SIZE", "USER", "OWNER", "IN USE", "HELD BY"))
    for memory in sealed.found:
        print(_sealed_row(memory))
    if sealed.found:
        print(_sealed_summary(sealed))
    return 0


def _row(report: RegionReport, names: list[str]) -> str:
    return _COLUMNS.format(
        _printable(report.key),
        _size(report.byte_size),
        _user(report.uid),
        "alive" if report.is_owner_alive else "dead",
        _age(report.age_s),
        f"{report.slots_in_use}/{report.slot_count}",
        _printable(", ".join(names)) or "-",
    )


def _summary(found: list[RegionReport]) -> str:
    dead = sum(not report.is_owner_alive for report in found)
    advice = "; `shm-backend-utils regions --reap` removes this user's" if dead else ""
    return f"{len(found)} regions, {dead} with a dead owner{advice}"


def _sealed_row(memory: SealedMemory) -> str:
    return _SEALED_COLUMNS.format(
        f"inode {memory.inode}",
        _size(memory.byte_size),
        "-" if memory.uid is None else _user(memory.uid),
        _OWNER[memory.is_owner_alive],
        f"{memory.slots_in_use}/{memory.slot_count}",
        ", ".join(f"{holder.pid} {_printable(holder.command)}" for holder in memory.holders),
    )


def _sealed_summary(search: Search) -> str:
    dead = sum(memory.is_owner_alive is False for memory in search.found)
    advice = "; it goes with the processes that hold it" if dead else ""
    rest = "" if search.is_complete else "; other users' processes may hold more"
    return f"{len(search.found)} sealed, {dead} with a dead owner{advice}{rest}"


def _registered_names(url: str) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, registration in fetch_registrations(url).items():
        names.setdefault(registration.key.removeprefix("/"), []).append(name)
    return names


def _printable(text: str) -> str:
    """Return what somebody has called a file, or registered it as, without what a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _size(byte_size: int) -> str:
    size, units = float(byte_size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
