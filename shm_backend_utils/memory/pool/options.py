"""How much shared memory a client may have, and how much it has."""

from __future__ import annotations

import math
import numbers
from dataclasses import InitVar, dataclass
from typing import Final, Literal, get_args

from ...errors import CallerError
from ..descriptors import PRIVATE, Access
from ..machine import available_bytes, memory_bytes
from ..shared_file import free_bytes

__all__ = ["PoolOptions", "PoolStatus", "RegionName"]

RegionName = Literal["auto", "system", "sealed"]

_REGIONS: Final = get_args(RegionName)
_ALWAYS: Final = 64
"""A client may always take this fraction (1/64) of the free memory, however much it already holds."""

_LEAST: Final = {"max_bytes": 1, "max_device_bytes": 1, "lend_bytes": 0, "max_batch_bytes": 0, "stream_guess_bytes": 0}
"""The least values of the options in bytes; an option whose least value is 1 may also be None."""


@dataclass(frozen=True)
class PoolOptions:
    """How much shared memory a client may have, and how long it keeps unused memory.

    Attributes
    ----------
    max_bytes : int or None
        The budget for all models together. None: the client holds at most as much memory as it leaves free in the
        machine or container, and for ``region="system"`` in ``/dev/shm``; but it may always take 1/64 of the free
        memory. The client measures again after each 1/64 of its budget.
    region : str
        The kind of memory. ``"sealed"``: a memfd, which cannot be truncated, has no name, ends with its processes,
        and needs no ``/dev/shm``. Models fetch it by a socket, so they must share this process' network namespace, as
        containers of one pod do. ``"system"``: POSIX shared memory. ``"auto"``: sealed where the model can fetch it,
        else system; ``explain()`` shows which. Triton's own shared memory (path ``triton-shm``) is always system.
    max_device_bytes : int or None
        The budget on each GPU; None for all of the GPU's memory.
    lend_bytes : int
        The smallest input on a GPU that is used in place, in bytes, if CUDA can share its memory; 0 for all. Smaller
        ones are copied on the GPU, because the model opens and closes lent memory for each call. That takes as long as
        a copy of 64 to 256 MiB on an idle GPU, and until the GPU is idle otherwise. A prepared call keeps it open.
    max_batch_bytes : int
        How much memory to take at once for calls that a model may serve as one batch, so that their rows follow one
        another; 0 for none. Only for models with a batcher, and calls that are made side by side.
    idle_s : float
        Seconds after which unused memory is freed.
    head_room : float
        The factor by which the room for an output of unknown size exceeds the most that it has needed.
    stream_guess_bytes : int
        How much memory a stream takes, all its frames together, for outputs of unknown size; 0 for none.
        It is never more than a quarter of the budget. A frame that does not fit comes back through Triton, and the
        next stream has room for it.
    prefault : bool
        Whether new memory is entered into this process' page tables at once, not page by page at first use.
    access : Access
        Who may open the memory; by default this user alone. A server that runs as another user needs, for example,
        ``Access(mode=0o660, group_id=...)``, and this user's id in the model's ``SHM_ALLOWED_UIDS``.
    huge_pages : None
        Leave it out: all memory has ordinary pages.
    """

    max_bytes: int | None = None
    region: RegionName = "auto"
    max_device_bytes: int | None = None
    lend_bytes: int = 256 * 2**20
    max_batch_bytes: int = 64 * 2**20
    idle_s: float = 60.0
    head_room: float = 1.25
    stream_guess_bytes: int = 16 * 2**20
    prefault: bool = True
    access: Access = PRIVATE
    huge_pages: InitVar[None] = None

    def __post_init__(self, huge_pages: object) -> None:
        if huge_pages is not None:
            raise CallerError("PoolOptions.huge_pages is gone: all memory has ordinary pages; leave it out")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and least:
                continue
            is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not is_number:
                raise CallerError(f"PoolOptions.{name} is {value!r}; expected a whole number of bytes, such as 2**30")
            if value < least:
                expected = "a number of bytes above 0" if least else "bytes, 0 or more"
                raise CallerError(f"PoolOptions.{name} is {value}; expected {expected}")
        if self.region not in _REGIONS:
            raise CallerError(f"PoolOptions.region is {self.region!r}; expected {', '.join(map(repr, _REGIONS))}")
        if not self.idle_s >= 0:
            raise CallerError(f"PoolOptions.idle_s is {self.idle_s}; expected a number of seconds, 0 or more")
        if not self.head_room >= 1:
            raise CallerError(f"PoolOptions.head_room is {self.head_room}; expected a factor of 1 or more")

    def budget_bytes(self, held_bytes: int) -> int:
        """Return ``max_bytes``, or else half of held and free memory, but at least all held and 1/64 of free memory."""
        if self.max_bytes is not None:
            return int(self.max_bytes)
        free = min(available_bytes(), free_bytes() if self.region == "system" else math.inf)
        free = memory_bytes() if free == math.inf else max(int(free), 0)  # all memory if the free part is unknown
        return max((held_bytes + free) // 2, held_bytes + free // _ALWAYS)


@dataclass(frozen=True)
class PoolStatus:
    """A pool's present slots and bytes."""

    held: int
    idle: int
    quarantined: int
    byte_size: int
    max_bytes: int
