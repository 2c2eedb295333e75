"""Regions that a server has registered: Triton's own shared memory, as users of tritonclient use it."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, Final, NamedTuple

from tritonclient.utils import shared_memory

from ...client.paths.triton_shm import unregister_when_free
from ...errors import NoSharedMemoryError
from ...memory.descriptors import translate_os_errors
from ...memory.shared_file import DEV_SHM

__all__ = ["RegisteredRegion", "registered_region"]

_PATIENCE_S: Final = 10.0


class RegisteredRegion(NamedTuple):
    """A region of this process that a server has registered."""

    name: str  # at the server, and of the object in /dev/shm
    handle: Any  # as tritonclient.utils.shared_memory takes it


def registered_region(stack: ExitStack | AsyncExitStack, plain: Any, name: str, byte_size: int) -> RegisteredRegion:
    """Make a region with memory for every byte, and register it through tritonclient until the stack closes."""
    handle = shared_memory.create_shared_memory_region(name, f"/{name}", byte_size, create_only=True)
    stack.callback(shared_memory.destroy_shared_memory_region, handle)
    _take_memory(name, byte_size)
    plain.register_system_shared_memory(name, f"/{name}", byte_size)
    unregister = partial(plain.unregister_system_shared_memory, name)
    stack.callback(unregister_when_free, unregister, _PATIENCE_S)
    return RegisteredRegion(name, handle)


@translate_os_errors()
def _take_memory(name: str, byte_size: int) -> None:
    """Allocate memory for every byte, so that a full /dev/shm fails here, and not with a SIGBUS at the first access."""
    file = os.open(DEV_SHM / name, os.O_RDWR)
    try:
        os.posix_fallocate(file, 0, byte_size)
    except OSError as error:
        needed = f"{byte_size:,} bytes for Triton's own shared memory"
        raise NoSharedMemoryError(f"/dev/shm has no room for {needed}: {error.strerror}; give it more") from None
    finally:
        os.close(file)
