"""An honest client: sends checked requests one after another, and tells when each began and how long it took."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.errors import ShmError

from ..client.models import MODELS, Noise, Said, is_right
from ..client.process import stop_event
from .attacker import READY

PAUSE_S: Final = 0.008
FAILED_PAUSE_S: Final = 0.1
TIMEOUT_S: Final = 15.0
REPORT_S: Final = 0.25
LARGEST_BYTES: Final = 1 << 17
SHARE_OF_STREAMS: Final = 0.02
CALLED: Final = ("identity", "halves", "rows")


class Honest:
    """One client over gRPC or HTTP; streams only over gRPC.

    It keeps no idle memory for long, and has sealed memory alone. So models fetch regions from it all the time, which
    floods of the handover are about.
    """

    def __init__(self, url: str, seed: int) -> None:
        pool = PoolOptions(region="sealed", idle_s=0)
        self._client = ShmClient(url, timeout_s=TIMEOUT_S, path="direct", pool=pool)
        self._has_streams = not url.startswith("http")
        self._chance = random.Random(seed)
        self._noise = Noise(seed)

    def step(self) -> tuple[str, float, float, str]:
        """Make one request; return what kind it was, when it began, how long it took, and what went wrong."""
        deed: Callable[[], bool] = self._infer
        kind = "request"
        if self._has_streams and self._chance.random() < SHARE_OF_STREAMS:
            deed, kind = self._stream, "stream"
        began = time.monotonic()
        try:
            error = "" if deed() else "wrong bytes"
        except ShmError as failure:
            error = f"{type(failure).__name__}: {str(failure)[:200]}"
        return kind, began, time.monotonic() - began, error

    def _infer(self) -> bool:
        model = MODELS[self._chance.choice(CALLED)]
        words = self._noise.words(most=LARGEST_BYTES)
        payload = {"identity": words.view(np.float32), "rows": words.reshape(1, -1)}.get(model.name, words)
        result = self._client.infer(model.name, {model.source: payload}, outputs={model.sink: payload.nbytes})
        return is_right(result[model.sink], model.expected(payload, Said()))

    def _stream(self) -> bool:
        image = self._noise.photograph(256)
        with closing(self._client.stream("frames", {"IMAGE": image}, frames=1)) as frames:
            return all(is_right(result["TILE"], image) for result in frames)


def main(seed: int, url: str) -> None:
    """Run the client until its standard input ends."""
    honest = Honest(url, seed)
    is_over = stop_event()
    honest.step()  # what only the first request costs is nobody's attack
    print(READY, flush=True)
    told: list[tuple[str, float, float, str]] = []
    due = time.monotonic() + REPORT_S
    while not is_over.wait(FAILED_PAUSE_S if told and told[-1][-1] else PAUSE_S):
        told.append(honest.step())
        if time.monotonic() > due:
            print(json.dumps(told), flush=True)
            told, due = [], time.monotonic() + REPORT_S
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
