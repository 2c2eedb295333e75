"""Which device is current in each thread, and calls of CUDA's driver beside graph captures of other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ..process import call_after_fork
from .errors import CudaError

__all__ = ["Contexts"]


class _InThread(threading.local):
    """The state of CUDA in one thread, as this package has changed it."""

    device: int | None = None  # which device CudaRuntime.current has made current; None: any or none may be
    is_relaxed = False  # whether calls are allowed that captures by default forbid


class Contexts:
    """Each device's primary context, which this process and all libraries in it share. Thread-safe."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # reentrant: a finalizer may need a context while its thread holds the lock
        self._contexts: dict[int, Any] = {}
        self._here = _InThread()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Forget the threads of the parent, which do not run in a forked child. CUDA refuses all calls there."""
        self._lock = threading.RLock()
        self._here = _InThread()

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make a device current for a block of this package's calls (``cuCtxPushCurrent``).

        Blocks of the same device inside it need no call. The block must not contain a ``yield``, or other libraries'
        code: both may make another device current. Only calls that no graph capture forbids belong directly into it:
        about streams, and calls that enqueue work.
        """
        here = self._here
        former = here.device
        if former == device:
            yield
            return
        self._ask(f"making GPU {device} current", "cuCtxPushCurrent", self._context(device))
        here.device = device
        try:
            yield
        finally:
            here.device = former
            self._ask("going back to the former GPU", "cuCtxPopCurrent")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device current as :meth:`current` does, for any calls, and for code of other libraries."""
        here = self._here
        with self.current(device), self._beside_captures():
            here.device = None
            try:
                yield
            finally:
                here.device = device

    def make_current(self, device: int) -> None:
        """Make a device current in the calling thread, from now on (``cuCtxSetCurrent``)."""
        self._ask(f"making GPU {device} current", "cuCtxSetCurrent", self._context(device))

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Allow calls that CUDA by default forbids in all threads while any thread captures a stream into a graph."""
        here = self._here
        if here.is_relaxed:
            yield
            return
        exchange = self._driver.cuThreadExchangeStreamCaptureMode
        error, former = exchange(self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        here.is_relaxed = not error
        try:
            yield
        finally:
            here.is_relaxed = False
            if not error:
                exchange(former)

    @contextlib.contextmanager
    def _on_any(self) -> Iterator[None]:
        """Make a device current, if none is, for calls that work on any device; prefer a device that has a context."""
        is_current = self._here.device is not None or int(self._ask("asking which GPU is current", "cuCtxGetCurrent"))
        with self._beside_captures() if is_current else self.on(next(iter(self._contexts.copy()), 0)):
            yield

    def _context(self, device: int) -> Any:
        """Return a device's primary context, which this process and all libraries in it share."""
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                doing = f"making GPU {device} ready"
                context = self._contexts.get(device) or self._ask(
                    doing, "cuDevicePrimaryCtxRetain", self._ask(doing, "cuDeviceGet", device)
                )
                self._contexts[device] = context
        return context

    def _ask(self, doing: str, name: str, *arguments: Any) -> Any:
        """Call a driver function, and return its results without the error code."""
        try:
            error, *found = getattr(self._driver, name)(*arguments)
        except (KeyError, ValueError) as unknown:  # the bindings do not know an error of a newer driver
            raise CudaError(doing, f"CUresult {unknown}") from None
        if error:
            raise CudaError(doing, error.name)
        return found[0] if len(found) == 1 else found
