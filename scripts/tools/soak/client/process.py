"""The soak's side of its clients: starts them, listens to them, sees whether they get on, and ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Final

from .board import Board, Phase
from .tally import Tally

__all__ = ["ClientProcess"]

PROGRAM: Final = "scripts.tools.soak.client"
STOP_S: Final = 60.0


class ClientProcess:
    """One client process.

    Attributes
    ----------
    pid : int
    was_killed : bool
    """

    def __init__(self, grpc_url: str, http_url: str, seed: int, tally: Tally) -> None:
        self._board = Board.create()
        self._tally = tally
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", PROGRAM, "--grpc", grpc_url, "--http", http_url),
                *("--seed", str(seed), "--board", str(self._board.fd)),
            ],
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
