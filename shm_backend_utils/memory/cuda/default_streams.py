"""CUDA's default streams, which have numbers and no handles. Each is a stream of whatever device is current.

Array libraries say 0 where they mean the legacy one. To the driver's functions, 0 may be a default stream of each
thread; so what a library says is read as ``stream or LEGACY_STREAM``.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_STREAMS", "LEGACY_STREAM", "PER_THREAD_STREAM"]

LEGACY_STREAM: Final = 1
"""The one that streams which are not "non-blocking" wait for, and it for them (``CU_STREAM_LEGACY``)."""

PER_THREAD_STREAM: Final = 2
"""The thread's own. It waits for the legacy one alone (``CU_STREAM_PER_THREAD``)."""

DEFAULT_STREAMS: Final = frozenset({0, LEGACY_STREAM, PER_THREAD_STREAM})
