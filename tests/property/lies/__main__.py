"""Tell one path so many lies, and print as JSON what came of them; one that is believed, or crashes, ends it."""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

from tritonclient.utils import InferenceServerException

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.errors import PeerError

from .ways import Forwarded, InBand, Path, Prepared, Stream, Way, Whole

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
"""The ways by which lies can come: on the client's three paths, and between models."""


def main() -> int:
    path, count = sys.argv[1], int(sys.argv[2])
    faulthandler.enable()
    logging.disable()
    warnings.simplefilter("ignore")  # of copies
    chance = random.Random(1)
    found: Counter[str] = Counter()
    with ExitStack() as at_end:
        ways = [at_end.enter_context(closing(make(chance))) for make in PATHS[path]]
        shares = [way.share for way in ways]
        for number in range(count):
            (way,) = chance.choices(ways, shares)
            try:
                outcome = _told(way)
            except BaseException:
                print(f"lie {number}, by {type(way).__name__}:", file=sys.stderr)
                raise
            found[outcome] += 1
    print(json.dumps(found))
    return 0


def _told(way: Way) -> str:
    try:
        return way.tell()
    except InferenceError:
        return "an error of the server's"
    except (PeerError, InferenceServerException) as error:
        return type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
