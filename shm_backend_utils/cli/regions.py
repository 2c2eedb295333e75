"""``shm-backend-utils regions``: what lies in shared memory, whose it is; and the removal of what the dead left."""

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

__all__ = ["add_command"]

_COLUMNS: Final = "{:<36} {:>9} {:<10} {:<6} {:>9} {:>7}  {}"


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
    if arguments.json:
        for report in found:
            print(json.dumps({**asdict(report), "registered_as": names.get(report.key, [])}))
        return 0
    if found:
        print(_COLUMNS.format("REGION", "SIZE", "USER", "OWNER", "AGE", "IN USE", "REGISTERED AS"))
    for report in found:
        print(_row(report, names.get(report.key, [])))
    print(f"{len(found)} removed" if arguments.reap else _summary(found))
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
