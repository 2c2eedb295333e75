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

    Opening an object to register it, and unmapping it to unregister it, is what the kernel tells models of.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, RegisteredRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region and map it.

        Raises
        ------
        ServerError
            The name is taken, or there is no such memory.
        """
        with self._lock:
            if name in self._regions:
                raise ServerError(f"shared memory region '{name}' already in manager", "ALREADY_EXISTS")
            try:
                descriptor = os.open(DEV_SHM / key.lstrip("/"), os.O_RDWR | os.O_CLOEXEC)
            except (OSError, ValueError):
                raise ServerError(f"Unable to open shared memory region: '{key}'", "INTERNAL") from None
            try:
                size = os.fstat(descriptor).st_size
                if not name or byte_size <= 0 or offset < 0 or offset + byte_size > size:
                    raise ServerError(f"Invalid shared memory region: '{key}'", "INTERNAL")
                memory = mmap.mmap(descriptor, offset + byte_size)
            finally:
                os.close(descriptor)
            self._regions[name] = RegisteredRegion(name, key, offset, byte_size, memory)

    def unregister(self, name: str) -> None:
        """Unmap a region; all of them if the name is empty. An unknown name is fine."""
        with self._lock:
            gone = list(self._regions.values()) if not name else [r for r in self._regions.values() if r.name == name]
            for region in gone:
                del self._regions[region.name]
                with contextlib.suppress(BufferError):  # in use: it goes with the last request
                    region.memory.close()

    def find(self, name: str) -> list[RegisteredRegion]:
        """Return a region, or all of them if the name is empty.

        Raises
        ------
        ServerError
            There is none of this name.
        """
        with self._lock:
            if not name:
                return list(self._regions.values())
            if name not in self._regions:
                raise ServerError(f"Unable to find system shared memory region: '{name}'", "NOT_FOUND")
            return [self._regions[name]]

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Return the bytes that a tensor has in a region. Release it, or the region stays mapped.

        Raises
        ------
        ServerError
            There is no such region, or it is too small.
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise ServerError(f"Unable to find shared memory region: '{name}'", "NOT_FOUND")
            if not 0 <= offset < region.byte_size:
                raise ServerError(f"Invalid offset for shared memory region: '{name}'")
            if byte_size <= 0 or offset + byte_size > region.byte_size:
                raise ServerError(f"Invalid offset + byte size for shared memory region: '{name}'")
            start = region.offset + offset
            return memoryview(region.memory)[start : start + byte_size]
