"""A check that no shared memory is left behind by this process, or in the pools of Triton's Python backend."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

from ..memory.managed import KEY_PREFIX as MANAGED_PREFIX
from ..memory.segment import SEALED_LINK
from ..memory.shared_file import DEV_SHM

__all__ = ["UTIL_PREFIX", "ShmLeakProbe"]

POOL_PREFIX: Final = "triton_python_backend_shm_region_"
"""The prefix of the Python backend's pools, unless the server was started with another."""

UTIL_PREFIX: Final = "shm_util-"
"""How the names of the regions of ``shm_util`` begin in ``/dev/shm``; the process id follows."""

_OWN_PREFIXES: Final = (MANAGED_PREFIX, UTIL_PREFIX)
_PATIENCE_S: Final = 1.0  # a thread that hands sealed memory over may be just about to close its copy
_DELETED: Final = " (deleted)"  # an object that has lost its name meanwhile is held as before


class ShmLeakProbe:
    """A context manager that fails if there is more shared memory after its block than before.

    It counts this process' descriptors and mappings of objects in ``/dev/shm`` and of sealed memory. It also counts
    the objects in ``/dev/shm`` that this package has made here, and the bytes of the Python backend's pools. It does
    not check a block that raises. Without a block, :meth:`growth` returns the growth since the probe was made.

    Parameters
    ----------
    pool_prefix : str or None
        The prefix of the pools' names in ``/dev/shm``; by default the usual one, which servers share unless they were
        started with another. Give :attr:`EmbeddedServer.shm_prefix` for the pools of that server alone, or None to
        ignore pools: they grow with the first large request, and do not shrink.

    Raises
    ------
    AssertionError
        At the end of the block, if something has grown even after a garbage collection. The message lists each
        growth.
    """

    def __init__(self, pool_prefix: str | None = POOL_PREFIX) -> None:
        self._pool_prefix = pool_prefix
        self._before = self._held()

    def __enter__(self) -> ShmLeakProbe:
        self._before = self._held()
        return self

    def __repr__(self) -> str:
        return f"<ShmLeakProbe growth={dict(self.growth())}>"

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None or not self.growth():
            return
        gc.collect()  # objects that only wait for the collector are no leak
        grown = self.growth()
        deadline = time.monotonic() + _PATIENCE_S
        while grown and time.monotonic() < deadline:
            time.sleep(0.01)
            grown = self.growth()
        if grown:
            what = "; ".join(f"{name}: {count} more" for name, count in sorted(grown.items()))
            raise AssertionError(f"shared memory was left behind: {what}")

    def growth(self) -> Counter[str]:
        """Return a description of each growth and its amount; empty without growth.

        Pools of the Python backend grow by bytes, all else by its number. Garbage counts until it is collected.
        """
        return self._held() - self._before

    def _held(self) -> Counter[str]:
        held = _descriptors() + _mappings() + _objects()
        if self._pool_prefix is not None:
            held[f"bytes of pools /dev/shm/{self._pool_prefix}*"] = _byte_size(self._pool_prefix)
        return held


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a Path per descriptor would cost every test
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if target == SEALED_LINK:
                target = _sealed(os.stat(f"/proc/self/fd/{descriptor}").st_ino)  # noqa: PTH116
                found[f"descriptor of {target}"] += 1
        except FileNotFoundError:
            continue  # the listing's own descriptor, or one that another thread has closed meanwhile
        if target.startswith(f"{DEV_SHM}/"):
            found[f"descriptor of {target.removesuffix(_DELETED)}"] += 1
    return found


def _mappings() -> Counter[str]:
    found: Counter[str] = Counter()
    maps = Path("/proc/self/maps").read_text()
    if f" {DEV_SHM}/" not in maps and SEALED_LINK not in maps:  # most often no line of many hundred has it
        return found
    for line in maps.splitlines():
        *_, inode, target = line.split(maxsplit=5)
        if target == SEALED_LINK:
            found[f"mapping of {_sealed(int(inode))}"] += 1
        if target.startswith(f"{DEV_SHM}/"):
            found[f"mapping of {target.removesuffix(_DELETED)}"] += 1
    return found


def _sealed(inode: int) -> str:
    return f"sealed memory, inode {inode}"  # it has no name


def _objects() -> Counter[str]:
    return Counter(f"object {path}" for prefix in _OWN_PREFIXES for path in DEV_SHM.glob(f"{prefix}{os.getpid()}-*"))


def _byte_size(prefix: str) -> int:
    total = 0
    for path in DEV_SHM.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # its server has ended meanwhile
            total += path.stat().st_size
    return total
