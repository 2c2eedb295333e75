"""What both clients are made with, and what follows from it for every call."""

from __future__ import annotations

import time
import weakref

from ..errors import CallerError
from ..region.cuda import CudaAccess
from .demand import Demand
from .device_bank import DeviceBank
from .options import RequestOptions, Tls, check_options, check_timeout, check_tls
from .origin import Origin
from .paths import PathName, check_path
from .pool import SlotPool
from .pool_options import PoolOptions
from .transport import split_url

__all__ = ["Terms"]


class Terms:
    """A client's settings, and its memory, which goes with the client.

    Attributes
    ----------
    url : str
    timeout_s : float
    tls : Tls or None
    pool : SlotPool
    bank : DeviceBank
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        path: PathName,
        pool: PoolOptions | None,
        tls: Tls | None,
        cuda: CudaAccess | None,
    ) -> None:
        _, is_secure, _, _ = split_url(url)
        if tls is not None and not is_secure:
            raise CallerError(f"tls was given, but URL {url!r} is without TLS; write grpcs:// or https://")
        if tls is not None:
            check_tls(tls)
        self.url = url
        self.timeout_s = check_timeout(timeout_s)
        self.tls = tls
        pool = pool or PoolOptions()
        self.bank = DeviceBank(cuda or CudaAccess(), pool.max_device_bytes)
        self.pool = SlotPool(pool, self.bank.collect)
        self._path = check_path(path)

    def end_with(self, client: object) -> None:
        """Close the memory when the client is garbage, or when the interpreter exits."""
        self._finalizer = weakref.finalize(client, _abandon, self.pool, self.bank)

    def end(self) -> None:
        """Close the memory."""
        self.pool.close()
        self.bank.close()
        self._finalizer.detach()

    def patience_s(self, timeout_s: float | None) -> float:
        """Return how long to wait, in seconds, where a call says so or not."""
        return self.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def demand(
        self, what: str, model: str, path: PathName | None, timeout_s: float | None, options: RequestOptions
    ) -> Demand:
        """Check what a call says beside its tensors.

        Raises
        ------
        CallerError, TypeError
            It cannot be said so.
        """
        if options:
            options = check_options(options)
        return Demand(
            model=model,
            path=self._path if path is None else check_path(path),
            deadline=time.monotonic() + self.patience_s(timeout_s),
            options=options,
            origin=Origin(what, depth=3),
        )


def _abandon(pool: SlotPool, bank: DeviceBank) -> None:
    pool.abandon()
    bank.abandon()
