"""The clients' processes from both sides: the page that they share with the soak, how they start, and how they end."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.segment import SEALED_LINK
from shm_backend_utils.memory.shared_file import DEV_SHM

from ...processes import Program, mappings, open_files
from .tally import Tally

CLIENT: Final = "scripts.tools.soak.client"
CONNECTIONS: Final = 4
"""Of a client: it infers over each before its requests are told of, or are another user's."""
PHASE: Final = 0
VERIFIED: Final = 1
"""The words of a client's page: what it is doing, and how many right results it has seen."""

ATTACHED_PREFIX: Final = "soak-attached-"
"""Of regions that users of plain tritonclient make."""
Phase = IntEnum("Phase", "ELSEWHERE WRITING IN_FLIGHT READING STREAMING", start=0)
_OF_CLIENTS: Final = (f"{DEV_SHM}/{KEY_PREFIX}", f"{DEV_SHM}/{ATTACHED_PREFIX}", SEALED_LINK)


def page(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")


def hears(seconds: float = 0.0) -> bool:
    """Return whether standard input has a line, or ends, within this time: by its end a client is told to end."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def become(uid: int) -> None:
    """Go on as another user, of no group."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def held_memory(pid: int | str) -> list[str]:
    """Return what a process holds of clients' memory, descriptors and mappings."""
    held = [f"descriptor of {target}" for target in open_files(pid) if target.startswith(_OF_CLIENTS)]
    targets = [line.split(maxsplit=5)[-1] for line in mappings(pid)]
    return held + [f"mapping of {target}" for target in targets if target.startswith(_OF_CLIENTS)]


class ClientProcess(Program):
    """A client, and what it is at; with names of models it only infers, and tells of each request how it went."""

    def __init__(
        self, urls: Sequence[str], seed: int, tally: Tally, models: Sequence[str] = (), uid: int | None = None
    ) -> None:
        fd = os.memfd_create("soak")
        os.ftruncate(fd, mmap.PAGESIZE)
        self._page = page(fd)
        self._tally = tally
        super().__init__(CLIENT, *urls, seed, fd, os.geteuid() if uid is None else uid, *models, fds=[fd])
        os.close(fd)
        self.answers: list[tuple[float, float, str]] = []
        self.was_killed = False
        self._seen = 0
        self._progressed = time.monotonic()
        self.listen(self._take)

    @property
    def phase(self) -> Phase:
        return Phase(self._page[PHASE])

    def wait_for_results(self, count: int = 1) -> bool:
        deadline = time.monotonic() + 120.0
        while self._page[VERIFIED] < count and self.is_running and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._page[VERIFIED] >= count

    def idle_s(self) -> float:
        """Return for how long it has got no right result, as far as this was asked before."""
        if self._page[VERIFIED] != self._seen:
            self._seen = self._page[VERIFIED]
            self._progressed = time.monotonic()
        return time.monotonic() - self._progressed

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.was_killed = True
        super().kill(number)

    def _take(self, line: str) -> None:
        groups, answers = json.loads(line)
        self._tally.merge(groups)
        self.answers += map(tuple, answers)


class AttackerProcess(Program):
    """A hostile client. It says when it is ready, and does something only when it is its turn."""

    def __init__(self, name: str, seed: int, url: str) -> None:
        super().__init__("scripts.tools.soak.hostile.attacks", name, seed, url)

    def take_turn(self, seconds: float) -> dict[str, int]:
        """Let it be at work; return how its requests have been answered so far."""
        self.say("begin")
        time.sleep(seconds)
        self.say("end")
        answers: dict[str, int] = json.loads(self.hear())
        return answers
