"""Signals that raise at any point of a call, in a process that goes on afterwards."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from shm_backend_utils.memory.descriptors import Descriptor

from ..connections import Connection
from ..kit import Kit

__all__ = ["Signals", "SoakSignalError", "moment"]

EARLIEST_S: Final = 1e-5
LATEST_S: Final = 2e-2
AGAIN_S: Final = 1e-4


class SoakSignalError(Exception):
    """What SIGUSR1 raises here; SIGINT raises KeyboardInterrupt, as ever."""


class Signals:
    """Handlers of SIGINT and SIGUSR1 that raise only within :meth:`raise_in`, and once.

    They do not raise where Python itself loses something: in the module threading, as an interrupt within
    ``Condition.__enter__`` leaves the lock taken for ever, gRPC's too; and in the finalizer that closes a descriptor
    which an interrupt has taken from everybody: Python swallows what is raised there, and does not call it again.

    Attributes
    ----------
    has_raised : bool
        Whether they have, the last time.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self._connection: Connection | None = None
        self.has_raised = False
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def raise_in(
        self, work: Callable[[], None], number: signal.Signals, delay_s: float, connection: Connection
    ) -> None:
        """Do some work, with a signal on its way; what that raises ends the work, and is not seen by the caller."""
        self.has_raised = False
        self._connection = connection
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
            delay_s = AGAIN_S

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed or frame is None or self._loses_something(frame):
            return
        is_cancelled = None if self._connection is None else self._connection.interrupt()
        if is_cancelled is False:
            return
        self._is_armed = False
        self.has_raised = True
        if is_cancelled is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SoakSignalError

    def _loses_something(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename == threading.__file__ or frame.f_code is Descriptor.__del__.__code__


def moment(kit: Kit) -> float:
    """Return a delay, every magnitude as likely as any other."""
    return math.exp(kit.chance.uniform(math.log(EARLIEST_S), math.log(LATEST_S)))
