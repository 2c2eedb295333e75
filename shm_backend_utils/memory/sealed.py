"""Sealed memory: a memfd (memfd_create(2)) that has no name, cannot be truncated, and ends with its last process.

Processes fetch it from its maker over a socket (:mod:`.handover`), for which they share a network namespace alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Callable
from typing import Final

from ..errors import NoSharedMemoryError, RegionGoneError, RegionRefusedError
from ..protocol.handover import SealedKey
from . import locks
from .access import PRIVATE, Access
from .descriptors import Descriptor, translate_os_errors
from .handover.server import REGISTRY
from .machine import MORE_MEMORY, available_bytes, memory_bytes
from .mapped_segment import MappedSegment
from .shared_file import BLOCK_SIZE, NO_SPACE, allocate

__all__ = ["LINK", "SealedSegment"]

_MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; the os module has no name for it
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MOST_BYTES: Final = 2**40  # what it can grow to; of what has no space yet, nobody has to have any
_NAME: Final = "shmbu"

LINK: Final = f"/memfd:{_NAME} (deleted)"
"""The name of sealed memory in ``/proc/PID/fd`` and ``/proc/PID/maps``."""


class SealedSegment(MappedSegment):
    """A sealed memfd. Its key names a socket of its maker, and a number there."""

    @classmethod
    @translate_os_errors(failed='sealed memory cannot be made: {}; take other memory, by PoolOptions(region="system")')
    def create(
        cls,
        byte_size: int,
        token: bytes,
        *,
        access: Access = PRIVATE,
        prepare: Callable[[MappedSegment], None],
        deadline: float = math.inf,
    ) -> SealedSegment:
        """Make memory of whole pages, with all of its space taken, and offer it once ``prepare`` was called."""
        descriptor = _filled(byte_size, access, deadline)
        key = REGISTRY.new_key()
        try:
            segment = cls._make(str(key), descriptor, byte_size, prepare)
            segment._offered = key
            REGISTRY.offer(key, token, access, segment._descriptor.reopened)
        except BaseException:
            REGISTRY.withdraw(key)
            raise
        return segment

    _room = staticmethod(available_bytes)
    _offered: SealedKey | None = None  # the key under which its maker hands it out

    def renew(self, token: bytes) -> None:
        """Hand it to those who know another token."""
        if self._offered is not None:
            REGISTRY.renew(self._offered, token)

    def check(self, byte_size: int, field: str) -> None:
        """Raise unless its owner lives and has not removed it, and no holes were punched into it."""
        if self.is_unlinked:
            raise RegionGoneError(f"{field} was removed by its owner")
        if byte_size > self.byte_size:
            raise RegionRefusedError(field, f"it claims {byte_size} bytes, but {self.byte_size} are there")
        if os.fstat(self.fileno()).st_blocks * BLOCK_SIZE < self.space:
            raise RegionRefusedError(field, f"it had memory for {self.space} bytes, and now has holes")

    @property
    def is_unlinked(self) -> bool:
        """Whether its owner is dead, or has removed it, or it was closed here."""
        if self._map is None:
            return True
        if self._maker:
            return self._offered is None
        return not locks.is_owner_alive(self.fileno())

    def unlink(self) -> None:
        """Hand it out no more, and give back the owner's lease, by which models see that."""
        if self._offered is not None and self._maker == os.getpid():
            REGISTRY.withdraw(self._offered)
            locks.let_go_of_owner_lease(self.fileno())
            self._offered = None

    def close(self) -> None:
        """As of every segment; its maker removes it by closing, as it could not be found again."""
        self.unlink()
        super().close()


def _filled(byte_size: int, access: Access, deadline: float) -> Descriptor:
    """Return a new memfd, with space for so many bytes, and sealed. Its size leaves room to take more space."""
    descriptor = _memory()
    try:
        access.give_to(descriptor.fileno())
        allocate(descriptor.fileno(), 0, byte_size, available_bytes(), deadline)
        with contextlib.suppress(OSError):  # where files have a limit, it does not grow
            os.ftruncate(descriptor.fileno(), max(byte_size, _MOST_BYTES))
        fcntl.fcntl(descriptor.fileno(), fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        descriptor.close()  # here, as an error may keep it for long
        if getattr(error, "errno", None) in NO_SPACE:
            raise _no_memory(byte_size) from None
        raise
    return descriptor


def _memory() -> Descriptor:
    """Return a new memfd, which cannot be executed where the kernel can forbid that; some systems demand it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with contextlib.suppress(OSError):
        return Descriptor(os.memfd_create, _NAME, flags | _MFD_NOEXEC_SEAL)
    return Descriptor(os.memfd_create, _NAME, flags)


def _no_memory(byte_size: int) -> NoSharedMemoryError:
    return NoSharedMemoryError(
        f"sealed memory of {byte_size} bytes was asked for, but this process may have {available_bytes():.0f} more of "
        f"{memory_bytes()}; {MORE_MEMORY}, or take less: release results sooner, or lower PoolOptions(max_bytes=...)"
    )
