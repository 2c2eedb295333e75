"""The names of the Python backend's own shared memory, which no request may reach."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final

__all__ = ["USUAL_PREFIX", "is_pool", "prefix_of_pools"]

USUAL_PREFIX: Final = "triton_python_backend_shm_region_"
_STUB: Final = "triton_python_backend_stub"  # the program that executes a model instance

_SUFFIX: Final = r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+)"
"""The backend's suffix for each model instance: a UUID; in old releases, a number."""


def prefix_of_pools() -> str:
    """Return the prefix of the names of the backend's pools."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return USUAL_PREFIX
    if PurePath(words[0]).name != _STUB or len(words) < 3:
        return USUAL_PREFIX
    found = re.fullmatch(f"(.*?){_SUFFIX}", words[2], re.DOTALL)
    return USUAL_PREFIX if found is None else found[1]


def is_pool(key: str, prefix: str) -> bool:
    """Return whether an object of such a name, without a leading slash, is one of the backend's pools."""
    return key.startswith(USUAL_PREFIX) or re.fullmatch(re.escape(prefix) + _SUFFIX, key) is not None
