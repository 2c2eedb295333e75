"""A client of another user: sends some requests, and tells how many were answered rightly and how many refused."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Final

from shm_backend_utils.client import PathUnavailableError, ShmClient
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.errors import ShmError

from .models import MODELS, Noise, Said, is_right
from .process import Tally

REQUESTS: Final = 20
TIMEOUT_S: Final = 15.0


def visit(urls: Sequence[str], seed: int, tally: Tally) -> None:
    """Send requests to a model that takes some other users' memory."""
    model, noise, chance = MODELS["guests"], Noise(seed), random.Random(seed)
    for url in urls:
        with ShmClient(url, timeout_s=TIMEOUT_S, path="direct") as client:
            for _ in range(REQUESTS):
                payload, said = model.payload(noise), Said.random(chance)
                named = {"outputs": {model.sink: payload.nbytes}, **said.options()}
                try:
                    result = client.infer(model.name, {model.source: payload}, **named)
                except (MemoryRefusedError, PathUnavailableError):
                    tally.add("visit", "refused")
                except ShmError as error:
                    tally.add_error(error)
                else:
                    found = is_right(result[model.sink], model.expected(payload, said))
                    tally.add("visit", "right" if found else "wrong")


def main(uid: int, seed: int, *urls: str) -> None:
    """Run the client."""
    visit(urls, seed, Tally())  # all that is imported late is read while this user may read it
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    tally = Tally()
    try:
        visit(urls, seed, tally)
    except ShmError as error:
        tally.add_error(error)
    print(tally.take(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
