"""What /proc tells of processes that may end while they are looked at, and of one that has ended, nothing; programs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shm_backend_utils.cli.terminal import undisturbed

_END_S: Final = 60.0


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    lists = [read_if_there(thread / "children") for thread in _entries(Path(f"/proc/{pid}/task"))]
    return [int(child) for each in lists for child in each.split()]


def command_line(pid: int) -> str:
    return read_if_there(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def mappings(pid: int | str) -> list[str]:
    return read_if_there(Path(f"/proc/{pid}/maps")).splitlines()


def open_files(pid: int | str) -> list[str]:
    targets = []
    for link in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            targets.append(str(link.readlink()))
    return targets


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has resident, without shared memory, which belongs to no single process."""
    status = read_if_there(Path(f"/proc/{pid}/status"))
    return 1024 * sum(int(kibibytes) for kibibytes in re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", status))


def read_if_there(file: Path) -> str:
    """Return what a file in /proc says; empty if its process, or thread, has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _entries(folder: Path) -> list[Path]:
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found.extend(folder.iterdir())
    return found


@contextlib.contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program in a session of its own; if the block raises, end all of that, as Ctrl-C does, or by force."""
    process: subprocess.Popen[Any] | None = None
    try:
        with undisturbed():  # else a signal could leave the program running
            process = subprocess.Popen(words, start_new_session=True, **options)
        yield process
    except BaseException:
        if process is None:
            raise
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise


class Program:
    """A module in a process of its own, which is spoken to by lines. It is to end when its standard input does."""

    def __init__(self, module: str, *arguments: object, fds: Sequence[int] = ()) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink, self._source = self._process.stdin, self._process.stdout
        self._listener = threading.Thread()
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def say(self, line: str) -> None:
        self._sink.write(f"{line}\n")
        self._sink.flush()

    def hear(self) -> str:
        """Return its next line; an empty one if it has ended."""
        return self._source.readline()

    def listen(self, take: Callable[[str], None]) -> None:
        """Have each further line taken as it comes; a killed program may leave half of one."""

        def listen() -> None:
            for line in self._source:
                if line.endswith("\n"):
                    take(line)

        self._listener = threading.Thread(target=listen)
        self._listener.start()

    def end(self) -> bool:
        """Let it end; return whether it did, in time and without an error."""
        self._sink.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # a faulthandler tells where it hangs
        return self._status() == 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._status()

    def _status(self) -> int:
        status = self._process.wait()
        if self._listener.ident is not None:
            self._listener.join()
        self._sink.close()
        self._source.close()
        return status
