"""Registered system shared memory, as the server holds it: opened, mapped, read and written."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import NamedTuple

from ...memory.shared_file import DEV_SHM
from .requests import ServerError

__all__ = ["RegisteredRegion", "RegisteredRegions"]


class RegisteredRegion(NamedTuple):
    """A region, and what its name stands for."""

    name: str
    key: str
    offset: int
    byte_size: int
    memory: mmap.mmap


class RegisteredRegions:
    """The regions of one emulated server. Thread-safe.

    A region that is unregistered while a request is in it stays, and can be used, until that has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, RegisteredRegion] = {}
        self._leaving: set[str] = set()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region and map it; ServerError if the name is taken, or there is no such memory."""
        with self._lock:
            self._let_go()
            if name in self._regions:
                raise ServerError(f"shared memory region '{name}' already in manager", "ALREADY_EXISTS")
            try:
                descriptor = os.open(DEV_SHM / key.lstrip("/"), os.O_RDWR | os.O_CLOEXEC)
            except (OSError, ValueError):
                raise ServerError(f"Unable to open shared memory region: '{key}'", "INTERNAL") from None
            try:
                size = os.fstat(descriptor).st_size
                if not name or byte_size <= 0 or offset < 0 or offset + byte_size > size:
                    raise ServerError(f"failed to register shared memory region '{name}': invalid args")
                memory = mmap.mmap(descriptor, offset + byte_size)
            finally:
                os.close(descriptor)
            self._regions[name] = RegisteredRegion(name, key, offset, byte_size, memory)

    def unregister(self, name: str) -> None:
        """Unmap a region, when no request is in it any more; all of them if the name is empty. Any name is fine."""
        with self._lock:
            self._leaving |= {name} if name else set(self._regions)
            self._let_go()

    def find(self, name: str) -> list[RegisteredRegion]:
        """Return a region, or all of them if the name is empty; ServerError if there is none of this name."""
        with self._lock:
            self._let_go()
            if not name:
                return list(self._regions.values())
            if name not in self._regions:
                raise ServerError(f"Unable to find system shared memory region: '{name}'", "NOT_FOUND")
            return [self._regions[name]]

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Return the bytes that a tensor has in a region. Release it, or the region stays mapped.

        ServerError if there is no such region, or it is too small.
        """
        with self._lock:
            self._let_go()
            region = self._regions.get(name)
            if region is None:
                raise ServerError(f"Unable to find shared memory region: '{name}'", "NOT_FOUND")
            if not 0 <= offset < region.byte_size:
                raise ServerError(f"Invalid offset for shared memory region: '{name}'")
            if byte_size < 0 or offset + byte_size > region.byte_size:
                raise ServerError(f"Invalid offset + byte size for shared memory region: '{name}'")
            start = region.offset + offset
            return memoryview(region.memory)[start : start + byte_size]

    def _let_go(self) -> None:
        """Unmap what is unregistered, unless a request is in it."""
        for name in self._leaving & set(self._regions):
            with contextlib.suppress(BufferError):
                self._regions[name].memory.close()
                del self._regions[name]
        self._leaving &= set(self._regions)
