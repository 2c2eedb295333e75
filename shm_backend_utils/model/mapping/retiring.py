"""The end of memory of GPUs that nobody refers to any more, for those who may wait for it."""

from __future__ import annotations

import time
from typing import Final

from ...memory.cuda.access import CudaAccess

__all__ = ["collect_all"]

_MOST_S: Final = 1.0
_PAUSE_S: Final = 0.0005


def collect_all(cuda: CudaAccess) -> None:
    """Free and unmap all that is due, when GPUs have finished with it; at most for a second: the process goes soon."""
    deadline = time.monotonic() + _MOST_S
    while cuda.collect() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
