"""Which ways each path has by which lies can come."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from .forwarded import Forwarded, InBand
from .ways import Path, Prepared, Stream, Way, Whole

__all__ = ["PATHS"]

Make = Callable[[random.Random], Way]


def _over_both(path: Path) -> list[Make]:
    kinds = (Prepared, Whole)
    return [partial(kind, path=path, protocol=protocol) for kind in kinds for protocol in ("grpc", "http")]


PATHS: Final[Mapping[str, Sequence[Make]]] = {
    "direct": [*_over_both("direct"), partial(Stream, path="direct", protocol="grpc")],
    "triton-shm": _over_both("triton-shm"),
    "inline": [*_over_both("inline"), partial(Stream, path="inline", protocol="grpc")],
    "forward": [Forwarded, InBand],
}
"""The client's three, and what models do among themselves."""
