"""The process of a model that fetches sealed regions: what it has mapped, how many descriptors, how much memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.tools.processes import children, command_line, mappings, open_files
from shm_backend_utils.server import EmbeddedServer

__all__ = ["SealedStub", "stub_of"]


@dataclass(frozen=True)
class SealedStub:
    """The process of a model's only instance."""

    pid: int

    def inodes(self, name: str = "shmbu") -> list[int]:
        """Return the memfds of this name that are mapped there, one for each mapping."""
        lines = [line.split(maxsplit=5) for line in mappings(self.pid)]
        return [int(fields[4]) for fields in lines if fields[-1].startswith(f"/memfd:{name} ")]

    def descriptors(self) -> int:
        return len(open_files(self.pid))

    def shared_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"RssShmem:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    @property
    def is_alive(self) -> bool:
        """Whether it is there, and no zombie."""
        return bool(command_line(self.pid))


def stub_of(server: EmbeddedServer, model: str) -> SealedStub:
    (pid,) = [pid for pid in children(server.pid) if f"/{model}/1/model.py" in command_line(pid)]
    return SealedStub(pid)
