"""Takes snapshots of all that ``top`` shows, one after another: rates are what has grown since the one before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from ...errors import MachineError
from ...memory import reaper
from ...memory.backend_pools import STUB
from ...memory.machine_memory import available_bytes
from ...memory.shared_file import DEV_SHM, free_bytes, total_bytes
from ..shared_memory.pools import find_pool_files, pools_of
from ..shared_memory.processes import Identity, Process, look_into_processes
from ..shared_memory.sealed_memory import SealedMemory, sealed_memory_of
from .metrics import ModelRates, Reading, rates_between, read_metrics
from .snapshot import ProcessRow, RegionRow, Snapshot, Space

__all__ = ["Observer"]

_NO_SERIES: Final = (
    'no model publishes metrics: set the parameter SHM_METRICS to "true" in its config.pbtxt, and load it anew'
)


class Observer:
    """Takes snapshots, and keeps what the metrics port said last.

    Parameters
    ----------
    metrics_url : str
        The server's metrics port.
    """

    def __init__(self, metrics_url: str) -> None:
        self._metrics_url = metrics_url
        self._before: Reading | None = None

    def read_rates(self) -> list[ModelRates]:
        """Ask what models did since the last time; the first time, what they are.

        Raises
        ------
        MachineError
            The metrics port does not answer, or not as Triton's.
        """
        before, self._before = self._before, None
        self._before = read_metrics(self._metrics_url)
        return rates_between(before, self._before)

    def take(self) -> Snapshot:
        """Look at everything. If the server does not answer, the snapshot says so; the next one asks it again."""
        models: list[ModelRates] = []
        try:
            models = self.read_rates()
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
        regions += map(_sealed_row, sealed.found)
        return Snapshot(
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


def _sealed_row(memory: SealedMemory) -> RegionRow:
    return RegionRow(
        kind="sealed",
        name=f"inode {memory.inode}",
        byte_size=memory.byte_size,
        uid=memory.uid,
        is_owner_alive=memory.is_owner_alive,
        age_s=None,
        slot_count=memory.slot_count,
        slots_in_use=memory.slots_in_use,
        pids=tuple(holder.pid for holder in memory.holders),
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
