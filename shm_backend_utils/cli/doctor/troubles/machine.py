"""What can be wrong with this machine, or container."""

from __future__ import annotations

from typing import Final

from ....memory.machine_memory import MORE_MEMORY
from ..findings import Trouble

_MORE_ROOM: Final = "docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted at /dev/shm"

NO_DEV_SHM: Final = Trouble(
    "no-dev-shm",
    "There is no folder /dev/shm, where Triton's Python backend has its pools, and clients have their system regions.",
    f"Mount a tmpfs there ({_MORE_ROOM}).",
)
DEV_SHM_NOT_WRITABLE: Final = Trouble(
    "dev-shm-not-writable",
    "This user may not make files in /dev/shm, so its clients can have no regions there.",
    "Give /dev/shm its usual mode (chmod 1777 /dev/shm), or mount it so that it can be written to.",
)
DEV_SHM_SMALL: Final = Trouble(
    "dev-shm-small",
    "/dev/shm is small: Triton's Python backend keeps a pool there for each model instance, which grows with requests.",
    f"Give it more room ({_MORE_ROOM}).",
    is_fatal=False,
)
DEV_SHM_FULL: Final = Trouble(
    "dev-shm-full",
    "/dev/shm has hardly any room left: requests go in band then, or fail.",
    f"See what takes it with `shm-backend-utils regions`, and remove it, or give it more room ({_MORE_ROOM}).",
)
STALE_REGIONS: Final = Trouble(
    "stale-regions",
    "There are regions in /dev/shm whose owner is dead; they take its room.",
    "Remove them with `shm-backend-utils regions --reap`, each user his own. Clients and models do so, too, when they "
    "start.",
    is_fatal=False,
)
LEFTOVER_POOLS: Final = Trouble(
    "leftover-pools",
    "There are pools of Triton's Python backend in /dev/shm that no process here has mapped: a server that was killed "
    "leaves them.",
    "See which with `shm-backend-utils regions`. If no server of another container has this /dev/shm, remove them: "
    "rm /dev/shm/NAME.",
    is_fatal=False,
)
LITTLE_MEMORY: Final = Trouble(
    "little-memory",
    "This machine, or its container, has hardly any memory left; shared memory counts towards it.",
    f"End what takes it, or {MORE_MEMORY}.",
)
