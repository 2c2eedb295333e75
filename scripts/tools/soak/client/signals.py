"""Signals whose handler raises at any moment of a call."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from shm_backend_utils.memory.descriptors import Descriptor

Interrupt = Callable[[], bool | None]


class SoakSignalError(Exception):
    """What SIGUSR1 raises here; SIGINT raises KeyboardInterrupt, as ever."""


class Signals:
    """Handlers of SIGINT and SIGUSR1 that raise only within :meth:`raise_in`, once, and where Python loses nothing."""

    def __init__(self) -> None:
        self._is_armed = False
        self._interrupt: Interrupt = lambda: None
        self.has_raised = False  # whether they have, the last time
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def raise_in(self, work: Callable[[], None], number: signal.Signals, delay_s: float, interrupt: Interrupt) -> None:
        """Do some work; a signal comes meanwhile, whose handler raises if ``interrupt`` returns None."""
        self.has_raised = False
        self._interrupt = interrupt
        is_over = threading.Event()
        sender = threading.Thread(target=self._send, args=(number, delay_s, is_over))
        sender.start()
        try:
            try:
                self._is_armed = True
                work()
            finally:
                self._is_armed = False
        except (KeyboardInterrupt, SoakSignalError, asyncio.CancelledError):
            pass
        finally:
            is_over.set()
            sender.join()

    def _send(self, number: signal.Signals, delay_s: float, is_over: threading.Event) -> None:
        """Send the signal in a moment, and again where it could not raise."""
        while not is_over.wait(delay_s) and not self.has_raised:
            os.kill(os.getpid(), number)
            delay_s = 1e-4

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed or frame is None or _loses_something(frame):
            return
        is_interrupted = self._interrupt()
        if is_interrupted is False:
            return
        self._is_armed = False
        self.has_raised = True
        if is_interrupted is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SoakSignalError


def _loses_something(frame: FrameType) -> bool:
    """Return whether a frame is threading's, whose lock would stay taken, or the finalizer's, which runs only once."""
    return frame.f_code.co_filename == threading.__file__ or frame.f_code is Descriptor.__del__.__code__
