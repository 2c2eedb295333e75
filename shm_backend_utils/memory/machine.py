"""The memory that this process may use, of the machine or its container (cgroups(7)), and facts about sharing it.

The kernel charges sealed memory to the container that touches it first. If a process takes too much, no call fails: the
kernel kills the process. So this library checks the limits first.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["MORE_MEMORY", "available_bytes", "memory_bytes", "process_facts", "visible_devices"]

MORE_MEMORY: Final = "give the container more memory (docker: --memory; Kubernetes: resources.limits.memory)"
"""The remedy for too little memory."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_UNIFIED: Final = "0::"

_NAMESPACES: Final = Path("/proc/self/ns")
_SHARED: Final = ("ipc", "mnt", "pid", "net")  # of namespaces(7), those that decide what processes share
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = "/dev/shm"
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")

T = TypeVar("T")


def memory_bytes() -> int:
    """Return the machine's memory, or its container's limit if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([machine, *(limit for limit, _ in _limits())]))


def available_bytes() -> float:
    """Return how many more bytes this process may take; infinity if the system does not show it."""
    return min([_available_on_machine(), *(limit - used for limit, used in _limits())])


def _available_on_machine() -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return math.inf


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup of this process, and the used memory that the kernel cannot reclaim."""
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError):  # the root has no limit; other systems have other files
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            yield limit, used - _reclaimable(folder)


def _folders() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUP.read_text().splitlines():
            if line.startswith(_UNIFIED):
                folder = f"{_CGROUPS}{line.removeprefix(_UNIFIED).rstrip('/')}"
                while len(folder) >= len(str(_CGROUPS)):
                    yield Path(folder)
                    folder = folder.rpartition("/")[0]


def _reclaimable(folder: Path) -> int:
    """Return the memory that the kernel frees before it kills a process: pages of files without recent use."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def process_facts() -> dict[str, Any]:
    """Return facts about this process, in JSON's types: None if unknown, 0 for the size of an unlimited /dev/shm."""
    return {
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "boot_id": _if_known(lambda path: path.read_text().strip(), _BOOT_ID),
        "namespaces": {name: _if_known(lambda path: path.stat().st_ino, _NAMESPACES / name) for name in _SHARED},
        **_shm_facts(),
    }


def visible_devices() -> dict[str, str]:
    """Return the environment variables that are set and choose the GPUs of CUDA or of a container."""
    return {name: os.environ[name] for name in _VISIBLE if name in os.environ}


def _if_known(read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except (OSError, ValueError):
        return None


def _shm_facts() -> dict[str, int | None]:
    try:
        space, status = os.statvfs(_SHM), Path(_SHM).stat()
    except OSError:
        return {"shm_bytes": None, "shm_free_bytes": None, "shm_device": None}
    return {
        "shm_bytes": space.f_blocks * space.f_frsize,
        "shm_free_bytes": space.f_bavail * space.f_frsize,
        "shm_device": status.st_dev,
    }
