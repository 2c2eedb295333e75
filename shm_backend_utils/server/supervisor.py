"""The process between a launcher and its tritonserver: it ends the server when the launcher ends, however that ends.

Run as ``python -m shm_backend_utils.server.supervisor LOG LOG_LIMIT SHM_PREFIX COMMAND…`` with a pipe as standard input
whose other end the launcher holds. When that end closes (the launcher stopped, or was killed), or on SIGTERM, it asks
the server to exit, then kills it and its orphaned stubs. It removes the shared memory of the Python backend, which a
killed server leaves behind. If this process itself is killed, the kernel kills the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["BoundedLog", "supervise"]

GRACE_S: Final = 40.0
"""How long the server may take to exit: its own ``--exit-timeout-secs``, and time for models to let go."""

_POLL_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36


class BoundedLog:
    """A log file of at most ``limit`` bytes, and the ``limit`` bytes before them in ``FILE.1``."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append, starting the file anew when it is full."""
        if self._file.tell() + len(data) > self._limit:
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._file = self._path.open("wb", buffering=0)
        self._file.write(data[-self._limit :])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def supervise(log: BoundedLog, shm_prefix: str, command: list[str]) -> int:
    """Run the server until it exits or is ended, remove its shared memory, and return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  # there is one thread
    )
    try:
        _relay_until_exit(server, log)
    finally:
        _kill_group(server)
        for leftover in Path("/dev/shm").glob(f"{shm_prefix}*"):
            leftover.unlink(missing_ok=True)
    return server.returncode


def _relay_until_exit(server: subprocess.Popen[bytes], log: BoundedLog) -> None:
    assert server.stdout is not None
    lifeline = sys.stdin.fileno()
    os.set_blocking(server.stdout.fileno(), False)
    deadline = None
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)
        while server.poll() is None:
            for key, _ in selector.select(_POLL_S):
                if key.fd != lifeline:
                    _relay(key.fd, log)
                elif not os.read(lifeline, 1):
                    selector.unregister(lifeline)
                    server.terminate()
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                server.kill()
    _relay(server.stdout.fileno(), log)


def _relay(fd: int, log: BoundedLog) -> None:
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 1 << 16):
            log.write(data)


def _kill_group(server: subprocess.Popen[bytes]) -> None:
    """Kill the processes that the server left behind, and wait for all of them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def main() -> int:
    """Run as the module's docstring says."""
    log_path, limit, shm_prefix, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: os.close(sys.stdin.fileno()))
    with contextlib.closing(BoundedLog(Path(log_path), int(limit))) as log:
        return supervise(log, shm_prefix, command)


if __name__ == "__main__":
    sys.exit(main())
