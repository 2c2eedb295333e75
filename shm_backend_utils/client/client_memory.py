"""A client's memory, on the host and on GPUs, which goes with the client."""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import CallerError
from ..memory.cuda.access import CudaAccess
from ..memory.cuda.bank import DeviceBank
from ..memory.pool.options import PoolOptions
from ..memory.pool.pool import SlotPool

__all__ = ["ClientMemory"]


class ClientMemory:
    """A client's slots; CallerError if the options are something else."""

    def __init__(self, options: PoolOptions, cuda: CudaAccess) -> None:
        if not isinstance(options, PoolOptions):
            raise CallerError(f"pool is {options!r}; expected PoolOptions(max_bytes=...)")
        self.bank = DeviceBank(cuda, options.max_device_bytes)  # their memory on GPUs
        self.pool = SlotPool(options, self.bank.collect)
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def end_with(self, owner: object) -> None:
        """Abandon it when its owner is garbage, or when the interpreter exits."""
        self._finalizer = weakref.finalize(owner, _abandon, self.pool, self.bank)

    def abandon(self) -> None:
        """Close it from a finalizer; waits for a second at most."""
        _abandon(self.pool, self.bank)

    def end(self) -> None:
        """Close it. Twice is fine."""
        self.pool.close()
        self.bank.close()
        if self._finalizer is not None:
            self._finalizer.detach()


def _abandon(pool: SlotPool, bank: DeviceBank) -> None:
    pool.abandon()
    bank.abandon()
