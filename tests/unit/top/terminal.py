"""A terminal with a program in it: what it shows, and how it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

__all__ = ["Terminal", "top_in_terminal"]

DEADLINE_S = 60.0
HOME = "\x1b[H"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """As much of a terminal as is needed to see what a program that always draws the whole screen draws.

    Attributes
    ----------
    written : str
        Everything that the program has written so far.
    """

    def __init__(self, leader: int, follower: int, command: list[str], environment: dict[str, str]) -> None:
        self.written = ""
        self._leader = leader
        self.process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
        )

    def resize(self, width: int, height: int) -> None:
        """Have another size, which the program is told."""
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def read(self) -> None:
        """Take in what was written meanwhile."""
        while select.select([self._leader], [], [], 0.05)[0]:
            try:
                piece = os.read(self._leader, 1 << 16)
            except OSError:  # nobody has the other end any more
                return
            self.written += piece.decode(errors="replace")

    @property
    def frames(self) -> list[str]:
        """Each screen that was drawn, without colours."""
        return [CONTROL.sub("", frame).replace("\r", "") for frame in self.written.split(HOME)[1:]]

    def wait_for(self, is_so: Callable[[str], object]) -> str:
        """Return the first screen from the present one on of which this is so."""
        deadline = time.monotonic() + DEADLINE_S
        seen = max(len(self.frames) - 1, 0)
        while True:
            self.read()
            drawn = self.frames[seen:]
            for frame in drawn:
                if is_so(frame):
                    return frame
            seen += max(len(drawn) - 1, 0)  # the last one may not be all there
            assert self.process.poll() is None, self.written
            assert time.monotonic() < deadline, self.written

    def end(self, number: int) -> int:
        """End the program by a signal; return its exit status."""
        self.process.send_signal(number)
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline
        self.read()
        return self.process.returncode


@contextlib.contextmanager
def top_in_terminal(*arguments: str, width: int = 120, height: int = 45) -> Iterator[Terminal]:
    """Run ``top`` in a terminal until the block ends."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "shm_backend_utils", "top", *arguments]
        terminal = Terminal(leader, follower, command, environment | {"TERM": "xterm-256color"})
        os.close(follower)
        try:
            yield terminal
        finally:
            terminal.process.kill()
            terminal.process.wait()
    finally:
        os.close(leader)
