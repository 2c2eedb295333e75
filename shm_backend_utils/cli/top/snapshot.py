"""What ``top`` shows at one moment: shared memory, who has it mapped, and what models did since the moment before."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..shared_memory.pools import BackendPool
from .metrics import ModelRates

__all__ = ["ProcessRow", "RegionRow", "Snapshot", "Space"]


@dataclass(frozen=True)
class RegionRow:
    """A region, sealed or of ``/dev/shm``.

    Attributes
    ----------
    kind : str
        ``"system"`` or ``"sealed"``.
    name : str
        Its key; of sealed memory, which has none, its inode.
    byte_size, slot_count, slots_in_use : int
    uid : int or None
    is_owner_alive : bool or None
        None where nobody can be asked.
    age_s : float or None
        None for sealed memory, of which the kernel does not tell.
    pids : tuple of int
        Who has it mapped, or open.
    """

    kind: str
    name: str
    byte_size: int
    uid: int | None
    is_owner_alive: bool | None
    age_s: float | None
    slot_count: int
    slots_in_use: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class ProcessRow:
    """A process that has regions mapped: how many, and how many bytes of them.

    Attributes
    ----------
    pid : int
    program : str
        Its name; of a stub, which model it executes.
    regions, mapped_bytes : int
    """

    pid: int
    program: str
    regions: int
    mapped_bytes: int


@dataclass(frozen=True)
class Space:
    """How much memory there is: of ``/dev/shm``, and for this user's processes.

    Attributes
    ----------
    shm_bytes, shm_free_bytes : float or None
        None where there is no ``/dev/shm``.
    available_bytes : float
        Of the machine, or of the container's limit.
    """

    shm_bytes: float | None
    shm_free_bytes: float | None
    available_bytes: float


@dataclass(frozen=True)
class Snapshot:
    """What was found.

    Attributes
    ----------
    taken_s : float
        When, by ``time.time()``.
    space : Space
    models : list of ModelRates
        Those that publish metrics.
    remark : str
        Why there are no models, and what to do; empty if there are.
    regions : list of RegionRow
        The largest first.
    processes : list of ProcessRow
        The one that maps most first.
    pools : list of BackendPool
    is_complete : bool
        Whether this user may look into every process.
    """

    taken_s: float
    space: Space
    models: list[ModelRates]
    remark: str
    regions: list[RegionRow]
    processes: list[ProcessRow]
    pools: list[BackendPool]
    is_complete: bool

    def facts(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        space = {
            name: value if value is None or math.isfinite(value) else None for name, value in vars(self.space).items()
        }
        return {
            "taken_s": self.taken_s,
            "space": space,
            "models": [asdict(model) for model in self.models],
            "remark": self.remark,
            "regions": [asdict(region) for region in self.regions],
            "processes": [asdict(process) for process in self.processes],
            "pools": [pool.facts() for pool in self.pools],
            "is_complete": self.is_complete,
        }
