"""All faults in one place, undone when a test is over: dead processes, lost memory, dying servers, late answers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ...client.errors import deadline_exceeded
from ...client.transports.transport import AsyncTransport, Connectable, Transport
from ...memory.shared_file import DEV_SHM
from ...server import EmbeddedServer, Ports
from .system_calls import Failing, Fault, Interrupts

__all__ = ["Faults", "punch_hole", "take_private_shm", "truncate"]

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE: Final = 2  # FALLOC_FL_PUNCH_HOLE
_CLONE_NEWNS: Final = 0x20000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000

_PATIENCE_S: Final = 10.0
_ZOMBIE: Final = "Z"


def truncate(key: str, byte_size: int) -> None:
    """As :meth:`Faults.truncate`."""
    os.truncate(_path(key), byte_size)


def punch_hole(key: str, offset: int, byte_size: int) -> None:
    """As :meth:`Faults.punch_hole`."""
    _fallocate(_path(key), _KEEP_SIZE | _PUNCH_HOLE, offset, byte_size)


def take_space_beyond(key: str, offset: int, byte_size: int) -> None:
    """Allocate memory beyond the end of an object in ``/dev/shm``; its size stays."""
    _fallocate(_path(key), _KEEP_SIZE, offset, byte_size)


def take_private_shm(byte_size: int) -> bool:
    """Mount a private ``/dev/shm`` for this process and its children, for good; return whether that was permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={byte_size},mode=1777".encode()
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options) == 0
    )


def _path(key: str) -> Path:
    return DEV_SHM / key.removeprefix("/")


def _fallocate(path: Path, mode: int, offset: int, byte_size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b") as file:
        if libc.fallocate(file.fileno(), mode, offset, byte_size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


class MortalServer:
    """A server that can be killed and started again. A context manager: at its end the server is killed."""

    def __init__(self, model_repository: Path, **options: Any) -> None:
        self._models = model_repository
        self._options = options
        self._ports = Ports().resolve()
        self.server = self._start()  # the one that runs, or ran last

    def kill(self) -> None:
        """Kill it, and all that it has started (SIGKILL). Its registrations are lost."""
        if self.server.is_running:
            os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def come_back(self) -> None:
        """Start it again, and return when it is ready."""
        self.server = self._start()

    def __enter__(self) -> MortalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self) -> EmbeddedServer:
        return EmbeddedServer.start(self._models, ports=self._ports, **self._options)


class Late:
    """A server that executes requests at once, but answers late. Pass it to clients in place of a URL.

    A client with a shorter timeout gets a DeadlineExceededError, although the model has done the work.
    """

    def __init__(self, server: Connectable, seconds: float) -> None:
        self._server = server
        self.seconds = seconds  # how late. May be changed at any time

    def connect(self) -> Transport:
        """Return a transport for threads."""
        return _LateTransport(self._server.connect(), self)

    def connect_async(self) -> AsyncTransport:
        """Return a transport for tasks of the running event loop."""
        return _AsyncLateTransport(self._server.connect_async(), self)

    def pause_s(self, timeout_s: float) -> float:
        """Return how long to hold back an answer whose receiver waits ``timeout_s``."""
        return max(0.0, min(self.seconds, timeout_s))

    def check(self, timeout_s: float) -> None:
        """Raise DeadlineExceededError if the receiver has stopped waiting."""
        if self.seconds >= timeout_s:
            raise deadline_exceeded()


class _LateTransport(Transport):
    def __init__(self, inner: Transport, late: Late) -> None:
        self.codec, self.address, self.host = inner.codec, inner.address, inner.host
        self._inner = inner
        self._late = late

    def send(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        answer = self._inner.send(message, timeout_s)
        left_s = deadline - time.monotonic()
        time.sleep(self._late.pause_s(left_s))
        self._late.check(left_s)
        return answer

    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        for answer in self._inner.stream(message, timeout_s):
            time.sleep(self._late.pause_s(timeout_s))
            self._late.check(timeout_s)
            yield answer

    def close(self) -> None:
        self._inner.close()


class _AsyncLateTransport(AsyncTransport):
    def __init__(self, inner: AsyncTransport, late: Late) -> None:
        self.codec, self.address, self.host = inner.codec, inner.address, inner.host
        self._inner = inner
        self._late = late

    async def send(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        answer = await self._inner.send(message, timeout_s)
        left_s = deadline - time.monotonic()
        await asyncio.sleep(self._late.pause_s(left_s))
        self._late.check(left_s)
        return answer

    async def stream(self, message: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        async for answer in self._inner.stream(message, timeout_s):
            await asyncio.sleep(self._late.pause_s(timeout_s))
            self._late.check(timeout_s)
            yield answer

    async def close(self) -> None:
        await self._inner.close()


class Faults:
    """Faults to inject, one per method. A context manager, which undoes them at its end where possible."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def kill(self, pid: int) -> None:
        """Kill a process (SIGKILL), and return when it has ended."""
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while _is_running(pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} still runs {_PATIENCE_S:g} s after it was killed")
            time.sleep(0.001)

    def truncate(self, key: str, byte_size: int = 0) -> None:
        """Truncate an object in ``/dev/shm``; a process that touches memory beyond its new end gets a SIGBUS."""
        truncate(key, byte_size)

    def punch_hole(self, key: str, offset: int, byte_size: int) -> None:
        """Free the memory of a part of an object in ``/dev/shm``; its size stays.

        Reads return zeros there. If ``/dev/shm`` is full, a process that touches the part gets a SIGBUS.
        """
        punch_hole(key, offset, byte_size)

    def full_shared_memory(self) -> Failing:
        """Return a context manager in which this process finds ``/dev/shm`` full: no object gets memory there."""
        return Failing(Fault("posix_fallocate", 0, errno.ENOSPC, sys.maxsize))

    def failing(self, call: str, error: int, after: int = 0) -> Failing:
        """Return a context manager in which one system call fails: see :class:`.Fault`."""
        return Failing(Fault(call, after, error))

    def interrupts(self, *places: Path) -> Interrupts:
        """Return an interrupter of code at any of its bytecodes: see :class:`.Interrupts`."""
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
    """Return whether a process still runs; a zombie, which waits for its parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != _ZOMBIE
    except (FileNotFoundError, ProcessLookupError):
        return False
