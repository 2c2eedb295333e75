"""The processes of one server's Python models, by ``/proc``: children of the process that listens at its port."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .transports.this_machine import is_this_machine

__all__ = ["living_processes"]

_PROC: Final = Path("/proc")
_SERVER: Final = "tritonserver"
_STUB: Final = "triton_python_backend_stub"
_LISTENS: Final = "0A"
_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443, "grpcs": 443}


def living_processes(address: str, config: Mapping[str, Any], version: str) -> int | None:
    """Return how many processes of a Python model live; None where this process cannot see the server's."""
    url = urllib.parse.urlsplit(address)
    port = url.port or _PORTS.get(url.scheme)
    if not url.hostname or port is None or not is_this_machine(url.hostname):
        return None
    sockets = {*_listening(port)}
    parents = {pid: words for pid, _, words in _processes(_SERVER)}
    stubs = [(parent, words) for _, parent, words in _processes(_STUB)]
    servers = [pid for pid in {*parents, *(parent for parent, _ in stubs)} if _has_any(pid, sockets)]
    if len(servers) != 1:
        return None
    groups = "|".join(re.escape(str(group.get("name"))) for group in config.get("instance_group", ()))
    name = re.compile(rf"(?:{groups})(?:_[0-9]+)?")
    model, folders = str(config["name"]), []
    for parent, words in stubs:
        *_, folder, found_version, _ = ("", "", "", *Path(words[1]).parts)
        if parent != servers[0] or version not in ("", found_version):
            continue
        names = filter(name.fullmatch, words[2:])
        if any(folder == model or not each.startswith(f"{folder}_") for each in names):  # else it is another model's
            folders.append(folder)
    return folders.count(model) or len(folders)  # models that the server fetched lie in folders of other names


def _processes(program: str) -> Iterator[tuple[int, int, list[str]]]:
    """Yield number, parent and command line of all that run a program; one that has ended has no command line."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
            if Path(words[0]).name == program:
                parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
                yield int(folder.name), int(parent), words


def _listening(port: int) -> Iterator[str]:
    """Yield the link texts of sockets' descriptors, ``socket:[…]``, that listen at a port in this namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _has_any(pid: int, sockets: set[str]) -> bool:
    try:
        return any(str(each.readlink()) in sockets for each in (_PROC / str(pid) / "fd").iterdir())
    except OSError:  # it is another user's, or has ended
        return False
