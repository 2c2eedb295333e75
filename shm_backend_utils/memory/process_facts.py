"""The facts that decide whether two processes can share memory: their users and namespaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

__all__ = ["NAMESPACES", "process_facts", "visible_devices"]

NAMESPACES: Final = ("ipc", "mnt", "pid", "net")
"""Of namespaces(7), those that decide what a process shares with another one."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = "/dev/shm"
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def process_facts() -> dict[str, Any]:
    """Return facts about this process, in JSON's types; None for unknown ones.

    Two processes have the ``boot_id`` in common if one kernel runs both, and ``shm_device``, the number of
    ``/dev/shm``'s file system, if they share that; ``shm_bytes`` and ``shm_free_bytes`` are both 0 where it has no
    limit. ``namespaces`` are the inodes of :data:`NAMESPACES`.
    """
    return {
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "boot_id": _boot_id(),
        "namespaces": {name: _inode(f"/proc/self/ns/{name}") for name in NAMESPACES},
        **_shm_facts(),
    }


def visible_devices() -> dict[str, str]:
    """Return the variables of the environment that choose which GPUs CUDA, or a container, has; those that are set."""
    return {name: os.environ[name] for name in _VISIBLE if name in os.environ}


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
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


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None
