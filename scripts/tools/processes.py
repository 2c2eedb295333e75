"""What /proc tells of processes that may end while they are looked at; of one that has ended, nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    lists = [read_if_there(thread / "children") for thread in _entries(Path(f"/proc/{pid}/task"))]
    return [int(child) for each in lists for child in each.split()]


def command_line(pid: int) -> str:
    """Return a process' command line."""
    return read_if_there(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def mappings(pid: int | str) -> list[str]:
    """Return the lines that describe what a process has mapped."""
    return read_if_there(Path(f"/proc/{pid}/maps")).splitlines()


def open_files(pid: int | str) -> list[str]:
    """Return what a process' descriptors refer to."""
    targets = []
    for link in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            targets.append(str(link.readlink()))
    return targets


def read_if_there(file: Path) -> str:
    """Return what a file in /proc says; nothing if its process, or thread, has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _entries(folder: Path) -> list[Path]:
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found.extend(folder.iterdir())
    return found
