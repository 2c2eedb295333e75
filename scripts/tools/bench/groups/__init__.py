"""What the bench measures: :data:`GROUPS`, in the order of its report.

A row of the report is a :class:`~scripts.tools.common.figures.Figure`. To add one, measure it in the group where it
belongs; to add a group, write a module with a function that takes a :class:`~scripts.tools.bench.rounds.Bench` and
returns figures, and name it here. What a figure is held to stands at the top of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...common.figures import Figure
from ..rounds import Bench
from .client_time import client_time
from .modes import modes
from .own_time import own_time
from .round_trips import round_trips
from .slots import slots
from .strings import strings
from .throughput import throughput
from .triton_shm_client import compat, other_client

__all__ = ["GROUPS"]

GROUPS: Final[Mapping[str, Callable[[Bench], list[Figure]]]] = {
    "path": round_trips,
    "own-time": own_time,
    "other-client": other_client,
    "compat": compat,
    "client": client_time,
    "throughput": throughput,
    "slots": slots,
    "modes": modes,
    "strings": strings,
}
"""The groups by the names that ``--only`` knows."""
