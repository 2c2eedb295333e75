"""All faults in one place, undone when a test is over."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ...client.transports.connect import Connectable
from . import memory
from .interrupts import Interrupts
from .late import Late
from .servers import MortalServer
from .system_calls import Failing, Fault

__all__ = ["Faults"]

_PATIENCE_S: Final = 10.0
_ZOMBIE: Final = "Z"


class Faults:
    """Faults as methods. A context manager; at its end all is undone that can be."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def kill(self, pid: int) -> None:
        """Kill a process, and return when it runs no more (SIGKILL)."""
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while _is_running(pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} runs {_PATIENCE_S:g} s after it was killed")
            time.sleep(0.001)

    def truncate(self, key: str, byte_size: int = 0) -> None:
        """Truncate an object in ``/dev/shm``: see :func:`.truncate`."""
        memory.truncate(key, byte_size)

    def punch_hole(self, key: str, offset: int, byte_size: int) -> None:
        """Make an object in ``/dev/shm`` sparse: see :func:`.punch_hole`."""
        memory.punch_hole(key, offset, byte_size)

    def full_shared_memory(self) -> Failing:
        """Return a context manager in which this process finds ``/dev/shm`` full: no object gets memory there."""
        return Failing(Fault("posix_fallocate", 0, errno.ENOSPC, sys.maxsize))

    def failing(self, call: str, error: int, after: int = 0) -> Failing:
        """Return a context manager in which one call of the system fails: see :class:`.Fault`."""
        return Failing(Fault(call, after, error))

    def interrupts(self, *places: Path) -> Interrupts:
        """Return an interrupter of code at any of its lines: see :class:`.Interrupts`."""
        return Interrupts(*places)

    def late(self, server: Connectable, seconds: float) -> Late:
        """Return a server whose answers come late, for a client in place of a URL: see :class:`.Late`."""
        return Late(server, seconds)

    def mortal_server(self, model_repository: Path, **options: Any) -> MortalServer:
        """Start a server of the test's own, which can be killed and come back: see :class:`.MortalServer`."""
        return self._undo.enter_context(MortalServer(model_repository, **options))

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()


def _is_running(pid: int) -> bool:
    """Return whether a process does anything yet; a zombie, which waits for its parent to ask, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != _ZOMBIE
    except (FileNotFoundError, ProcessLookupError):
        return False
