"""Clients of the soak, from both sides: the page and the counts that they share, how they start, and how they end."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

_PHASE: Final = 0
_VERIFIED: Final = 1

PROGRAM: Final = "scripts.tools.soak.client"
STOP_S: Final = 60.0


class Phase(IntEnum):
    """What a client is doing."""

    ELSEWHERE = 0
    WRITING = 1
    IN_FLIGHT = 2
    READING = 3
    STREAMING = 4


class Board:
    """The page, on either side."""

    def __init__(self, fd: int) -> None:
        self.fd = fd  # owned; a client inherits it
        self._words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def create(cls) -> Board:
        """Make a page."""
        fd = os.memfd_create("soak")
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    @property
    def phase(self) -> Phase:
        """What the client is doing."""
        return Phase(self._words[_PHASE])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[_PHASE] = phase

    @property
    def verified(self) -> int:
        """How many right results the client has seen."""
        return self._words[_VERIFIED]

    @verified.setter
    def verified(self, count: int) -> None:
        self._words[_VERIFIED] = count

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Tally:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, Counter[str]] = {}
        self._samples: dict[str, str] = {}

    def add(self, group: str, name: str, count: int = 1) -> None:
        """Count."""
        with self._lock:
            self._groups.setdefault(group, Counter())[name] += count

    def add_error(self, error: BaseException, group: str = "errors") -> None:
        """Count an error by its class and the server's code; keep the first message of each."""
        status = getattr(error, "status", lambda: None)()
        name = type(error).__name__ + (f" {status.removeprefix('StatusCode.')}" if status else "")
        self.add(group, name)
        with self._lock:
            self._samples.setdefault(name, str(error)[:300])

    def group(self, name: str) -> dict[str, int]:
        """Return a group, the largest counts first."""
        with self._lock:
            return dict(self._groups.get(name, Counter()).most_common())

    def total(self, group: str) -> int:
        """Return the sum of a group."""
        return sum(self.group(group).values())

    @property
    def samples(self) -> Mapping[str, str]:
        """The first message of each kind of error."""
        with self._lock:
            return dict(self._samples)

    def take(self) -> str:
        """Return everything as a line of JSON, and begin anew."""
        with self._lock:
            text = json.dumps({"groups": self._groups, "samples": self._samples})
            self._groups = {}
            self._samples = {}
            return text

    def merge(self, text: str) -> None:
        """Add what another tally gave with :meth:`take`."""
        given = json.loads(text)
        for group, counts in given["groups"].items():
            for name, count in counts.items():
                self.add(group, name, count)
        with self._lock:
            self._samples = {**given["samples"], **self._samples}


def stop_event() -> threading.Event:
    """Return an event that is set when standard input ends: the soak wants this client to stop, or is gone."""
    event = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


class ClientProcess:
    """One client process."""

    def __init__(self, grpc_url: str, http_url: str, seed: int, tally: Tally) -> None:
        self._board = Board.create()
        self._tally = tally
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, grpc_url, http_url, str(seed), str(self._board.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._board.fd],
            text=True,
        )
        self.pid = self._process.pid
        self.was_killed = False
        self._verified = 0
        self._progressed = time.monotonic()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self._board.phase

    @property
    def verified(self) -> int:
        """How many right results it has seen."""
        return self._board.verified

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def idle_s(self) -> float:
        """Return for how long it has got no right result, as far as this was asked before."""
        if self.verified != self._verified:
            self._verified = self.verified
            self._progressed = time.monotonic()
        return time.monotonic() - self._progressed

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal."""
        self.was_killed = True
        self._process.send_signal(number)
        self._end()

    def stop(self) -> bool:
        """Let it close everything and end; return whether it did, in time and without an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # its faulthandler tells where it hangs
        self._end()
        return self._process.returncode == 0

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.wait()
        self._listener.join()
        self._process.stdin.close()
        self._process.stdout.close()
        self._board.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # a killed client may leave half a line
                self._tally.merge(line)
