"""What both clients are made with, and what follows from it for every call."""

from __future__ import annotations

import time

from ..errors import CallerError
from ..memory.cuda.memory import CudaAccess
from .demand import Demand
from .memory import ClientMemory
from .options import RequestOptions, Tls, check_options, check_timeout, check_tls
from .origin import Origin
from .paths import PathName, check_path
from .pool_options import PoolOptions
from .transport import split_url

__all__ = ["Terms"]


class Terms:
    """A client's settings, and its memory.

    Attributes
    ----------
    url : str
    timeout_s : float
    tls : Tls or None
    memory : ClientMemory
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
        self.memory = ClientMemory(pool or PoolOptions(), cuda or CudaAccess())
        self._path = check_path(path)

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
