"""SHM_PIN_HOST_MEMORY: regions of the host that CUDA copies from without a staging buffer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..report import Amounts, Figure, Report, name_of, require
from .client import Check, Client
from .slots import HostSlot

__all__ = ["CHECKS", "measure"]

COUNT: Final = 2**19
REQUESTS: Final = 3
TIMES_AS_FAST: Final = 3.0
_UNPINNED_S: Final = 20.0
_PAUSE_S: Final = 0.05
_WARM_UP_ROUNDS: Final = 3


def _pinned_once(client: Client) -> str:
    model = "to_device_pinned"
    before = client.model.counts()
    with client.host_slot(model, np.arange(COUNT, dtype=np.float32)) as slot:
        for _ in range(REQUESTS):
            _copy(client, model, slot, "CPU_PINNED")
        pinned = client.model.counts()["pin"] - before["pin"]
        require(pinned == 1, f"the model pinned memory {pinned} times for {REQUESTS} requests")
    deadline = time.monotonic() + _UNPINNED_S
    while client.model.counts()["unpin"] == before["unpin"]:
        require(time.monotonic() < deadline, f"the model has not undone it {_UNPINNED_S:g} s after it was given up")
        time.sleep(_PAUSE_S)
    unpinned = client.model.counts()["unpin"] - before["unpin"]
    require(unpinned == 1, f"the model has undone it {unpinned} times; expected once")
    return ""


def _pageable_otherwise(client: Client) -> str:
    before = client.model.counts()["pin"]
    with client.host_slot("to_device", np.arange(COUNT, dtype=np.float32)) as slot:
        _copy(client, "to_device", slot, "CPU")
    require(client.model.counts()["pin"] == before, "the model has pinned memory that it was not asked to")
    return ""


CHECKS: Final[Mapping[str, Check]] = {
    "SHM_PIN_HOST_MEMORY pins a region once, and undoes it": _pinned_once,
    "without it memory stays pageable": _pageable_otherwise,
}


def measure(report: Report, group: str, client: Client, amounts: Amounts) -> None:
    """Measure what to_device takes inside the model, from pinned and from pageable memory."""
    report.run(group, "to_device from pinned memory", lambda: _measure(report, group, client, amounts))


def _measure(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    values = np.arange(amounts.large_bytes // 4, dtype=np.float32)
    seconds: dict[str, list[float]] = {"CPU": [], "CPU_PINNED": []}
    with client.host_slot("to_device", values) as pageable, client.host_slot("to_device_pinned", values) as pinned:
        for round_number in range(-min(_WARM_UP_ROUNDS, amounts.slow_rounds), amounts.slow_rounds):
            for model, slot, kind in (("to_device", pageable, "CPU"), ("to_device_pinned", pinned, "CPU_PINNED")):
                taken = _copy(client, model, slot, kind)["seconds"]
                if round_number >= 0:
                    seconds[kind].append(taken)
    slow, fast = (statistics.median(seconds[kind]) * 1e3 for kind in ("CPU", "CPU_PINNED"))
    name = f"pinned to_device of {name_of(amounts.large_bytes)}"
    basis = f"{slow:.4f} ms / {fast:.4f} ms"
    return report.measured(
        Figure(name, slow / fast, "times as fast as from pageable memory", basis, at_least=TIMES_AS_FAST, group=group)
    )


def _copy(client: Client, model: str, slot: HostSlot, kind: str) -> dict[str, Any]:
    notes = client.infer(model, slot)
    require(notes["memory_type"] == kind, f"the model's memory is {notes['memory_type']}; expected {kind}")
    require(notes["is_right"], "the copy differs from what was copied")
    return notes
