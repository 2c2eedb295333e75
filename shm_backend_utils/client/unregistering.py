"""Unregistering regions that a request has just used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tritonclient.utils import InferenceServerException

__all__ = ["IN_USE", "unregister_when_free"]

IN_USE: Final = "currently in use"
"""What Triton before 24.12 says of a region that a request is in."""
_ROUND_S: Final = 0.01


def unregister_when_free(unregister: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Call ``unregister`` until the server no longer answers that a request is in the region; raise its other errors.

    Triton from 24.12 on says yes at once, and keeps the region until its requests have ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            unregister()
        except InferenceServerException as error:
            if IN_USE not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_ROUND_S)
        else:
            return
