"""What a soak must have done, word by word: a run that has left one out proves nothing of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = [
    "COMPLETE_S",
    "MODEL_RELOADS",
    "SERVER_RESTARTS",
    "SMALL_TMPFS",
    "TWO_USERS",
    "WORDS",
    "impossible",
    "left_out",
]

COMPLETE_S: Final = 60.0
"""A run of this length does everything that there is."""

_BY_CLIENTS: Final = (
    *("ShmClient", "AsyncShmClient", "gRPC", "HTTP", "infer", "prepare", "submit", "split", "streams", "batches"),
    *("strings", "forward", "compat", "attach", "varying shapes", "parameters", "headers", "overflows", "forks"),
    *("small calls", "tiny switch intervals", "signals at points", "sealed memory", "memory in /dev/shm"),
)
TWO_USERS: Final = "two users"
SMALL_TMPFS: Final = "a small tmpfs"
SERVER_RESTARTS: Final = "server restarts"
MODEL_RELOADS: Final = "model reloads"

WORDS: Final = (*_BY_CLIENTS, TWO_USERS, SMALL_TMPFS, SERVER_RESTARTS, MODEL_RELOADS)


def impossible(has_private_shm: bool) -> dict[str, str]:
    """Return what this machine cannot do, and why."""
    found = {}
    if os.geteuid() != 0:
        found[TWO_USERS] = "this user may not become another one"
    if not has_private_shm:
        found[SMALL_TMPFS] = "a /dev/shm of its own was not permitted, and nobody else's is to be filled"
    return found


def left_out(done: Mapping[str, int], cannot: Mapping[str, str]) -> list[str]:
    """Return the words that were never done, though they could have been."""
    return [word for word in WORDS if not done.get(word) and word not in cannot]
