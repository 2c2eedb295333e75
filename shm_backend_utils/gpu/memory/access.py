"""CUDA in one process, loaded on first use and then shared."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..runtime import CudaRuntime
from .mappings import CudaMappings

__all__ = ["CudaAccess"]


class CudaAccess:
    """CUDA in this process, loaded on first use; ``load`` raises MachineError on a machine without a GPU."""

    def __init__(self, load: Callable[[], CudaRuntime] = CudaRuntime) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._mappings: CudaMappings | None = None

    @property
    def mappings(self) -> CudaMappings:
        """This process' mappings; MachineError if cuda-bindings, the driver or the GPU is missing."""
        with self._lock:
            if self._mappings is None:
                self._mappings = CudaMappings(self._load())
            return self._mappings

    @property
    def runtime(self) -> CudaRuntime:
        """The runtime; raises as :attr:`mappings`."""
        return self.mappings.runtime

    @property
    def has_retired(self) -> bool:
        """Whether memory is due to be freed or unmapped."""
        mappings = self._mappings
        return mappings is not None and mappings.runtime.retired.is_waiting

    def drop(self, kept: list[object]) -> None:
        """Drop users' objects where their finalizers may wait for a GPU, or at once if CUDA was not used."""
        mappings = self._mappings
        if mappings is None:
            kept.clear()
        else:
            mappings.runtime.retired.add(kept.clear)

    def collect(self) -> bool:
        """Free and unmap memory that is due, if CUDA was used. Return whether some is left."""
        mappings = self._mappings
        return mappings is not None and mappings.runtime.retired.collect()

    def collect_soon(self) -> None:
        """Do work that need not wait; let a new thread free and unmap memory that is due. Not for finalizers."""
        mappings = self._mappings
        if mappings is not None:
            mappings.runtime.retired.poll()
            mappings.runtime.retired.collect_soon()

    def collect_now(self) -> None:
        """Free and unmap memory that is due, or wait until another thread has done so."""
        mappings = self._mappings
        if mappings is not None:
            mappings.runtime.retired.collect_now()
