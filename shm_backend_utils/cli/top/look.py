"""One look at all that ``top`` shows: shared memory, who has it mapped, and what models did since the last look."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final

from ...errors import MachineError
from ...memory import reaper
from ...memory.backend_pools import STUB
from ...memory.machine_memory import available_bytes
from ...memory.shared_file import DEV_SHM, free_bytes, total_bytes
from ..shared_memory.pools import BackendPool, find_pool_files, pools_of
from ..shared_memory.processes import Identity, Process, look_into_processes
from ..shared_memory.sealed_memory import sealed_memory_of
from .metrics import ModelRates, Reading, rates_between, read_metrics

__all__ = ["Look", "Observer", "ProcessRow", "RegionRow", "Space"]

_NO_SERIES: Final = (
    'no model publishes metrics: set the parameter SHM_METRICS to "true" in its config.pbtxt, and load it anew'
)


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
class Look:
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


class Observer:
    """Looks again and again.

    Parameters
    ----------
    metrics_url : str
        The server's metrics port.
    """

    def __init__(self, metrics_url: str) -> None:
        self._metrics_url = metrics_url
        self._before: Reading | None = None

    def read(self) -> list[ModelRates]:
        """Ask what models did since the last time; of the first time, what they are. Raises MachineError."""
        before, self._before = self._before, None
        self._before = read_metrics(self._metrics_url)
        return rates_between(before, self._before)

    def look(self) -> Look:
        """Look at everything. A server that does not answer is told of, and asked again the next time."""
        models: list[ModelRates] = []
        try:
            models = self.read()
            remark = "" if models else f"{self._metrics_url}: {_NO_SERIES}"
        except MachineError as error:
            remark = str(error)
        files = find_pool_files()
        system = _system_regions()
        processes = look_into_processes()
        sealed = sealed_memory_of(processes)
        pids: dict[Identity, list[int]] = {identity: [] for identity in system}
        rows = []
        for process in processes.found:
            ours = [each for each in process.mapped if each.is_sealed or each.identity in system]
            for each in ours:
                pids.setdefault(each.identity, []).append(process.holder.pid)
            if ours:
                rows.append(_process_row(process, [each.byte_size for each in ours]))
        regions = [_system_row(report, pids[identity]) for identity, report in system.items()]
        regions += [
            RegionRow(
                "sealed",
                f"inode {memory.inode}",
                memory.byte_size,
                memory.uid,
                memory.is_owner_alive,
                None,
                memory.slot_count,
                memory.slots_in_use,
                tuple(holder.pid for holder in memory.holders),
            )
            for memory in sealed.found
        ]
        return Look(
            taken_s=time.time(),
            space=_space(),
            models=models,
            remark=remark,
            regions=sorted(regions, key=lambda region: (-region.byte_size, region.name)),
            processes=sorted(rows, key=lambda row: (-row.mapped_bytes, row.pid)),
            pools=pools_of(files, processes),
            is_complete=sealed.is_complete,
        )


def _system_regions() -> Mapping[Identity, reaper.RegionReport]:
    found = {}
    for report in reaper.scan():
        with contextlib.suppress(OSError):  # it is gone meanwhile
            status = (DEV_SHM / report.key).lstat()
            found[status.st_dev, status.st_ino] = report
    return found


def _system_row(report: reaper.RegionReport, pids: list[int]) -> RegionRow:
    return RegionRow(
        kind="system",
        name=report.key,
        byte_size=report.byte_size,
        uid=report.uid,
        is_owner_alive=report.is_owner_alive,
        age_s=report.age_s,
        slot_count=report.slot_count,
        slots_in_use=report.slots_in_use,
        pids=tuple(pids),
    )


def _process_row(process: Process, sizes: list[int]) -> ProcessRow:
    return ProcessRow(process.holder.pid, _program(process), len(sizes), sum(sizes))


def _program(process: Process) -> str:
    """Return what a process is: the kernel cuts the names of programs, and all stubs have the same one."""
    with contextlib.suppress(OSError):
        words = (process.folder / "cmdline").read_text(errors="replace").split("\0")
        if PurePath(words[0]).name == STUB and len(words) > 1:  # then comes …/MODEL/VERSION/model.py
            return " ".join(["stub of", *PurePath(words[1]).parts[-3:-1]])
    return process.holder.command


def _space() -> Space:
    try:
        return Space(total_bytes(), free_bytes(), available_bytes())
    except OSError:
        return Space(None, None, available_bytes())
