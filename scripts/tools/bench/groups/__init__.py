"""What the bench measures: :data:`GROUPS`, in the order of its report.

A row of the report is a ``Figure``. To add one, measure it in the group where it belongs; to add a group, write a
module with a function that takes a ``Bench`` and returns figures, and name it here. What a figure is held to stands
above its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...figures import Figure
from ..bench import Bench
from .curves import latency
from .growth import growth, registered, sealed
from .modes import batches, forwarding, streams
from .own_time import functions, infer_time, own_time
from .round_trips import round_trips
from .stock import compat, infer_beside_stock, other_client, plain_clients
from .throughput import concurrency, throughput, uploads

GROUPS: Final[Mapping[str, Callable[[Bench], list[Figure]]]] = {
    "path": round_trips,
    "own-time": own_time,
    "client": infer_time,
    "sealed": sealed,
    "stock": infer_beside_stock,
    "plain": plain_clients,
    "throughput": throughput,
    "uploads": uploads,
    "other-client": other_client,
    "compat": compat,
    "batch": batches,
    "forward": forwarding,
    "registered": registered,
    "stream": streams,
    "growth": growth,
    "functions": functions,
    "concurrency": concurrency,
    "latency": latency,
}
"""The groups by the names that ``--only`` knows. Those of the pictures come last: large tensors grow Triton's pools."""

WITH_OTHER_CLIENT: Final = ("other-client", "compat")
"""Those that are of triton-shm-client, and so need it."""
