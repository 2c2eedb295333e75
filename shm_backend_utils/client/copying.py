"""Copying inputs to where they belong; long copies in a thread, if the client has better things to do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .runtime import Runtime
from .sources import Source

__all__ = ["LongCopy", "copy_all"]


class LongCopy:
    """A copy that may be made in another thread. It holds the memory that it copies to.

    Who waits for the thread may be cancelled, but the thread goes on: until it has ended, the memory must not be
    another call's.
    """

    def __init__(
        self, given: Mapping[str, Source], targets: Mapping[str, npt.NDArray[Any]], memory: npt.NDArray[np.uint8]
    ) -> None:
        self._given = given
        self._targets = targets
        self._memory: npt.NDArray[np.uint8] | None = memory
        self._claim = threading.Lock()  # of the thread that begins, or of who is cancelled before

    async def run(self, runtime: Runtime) -> None:
        """Copy, and return when that is done."""
        try:
            await runtime.offload(self._copy)
        except BaseException:
            if self._claim.acquire(blocking=False):
                self._let_go()
            raise

    def _copy(self) -> None:
        if self._claim.acquire(blocking=False):
            try:
                copy_all(self._given, self._targets)
            finally:
                self._let_go()

    def _let_go(self) -> None:
        self._targets = {}
        self._memory = None


def copy_all(given: Mapping[str, Source], targets: Mapping[str, npt.NDArray[Any]]) -> None:
    """Copy inputs to where they belong."""
    for name, source in given.items():
        source.write_to(targets[name])
