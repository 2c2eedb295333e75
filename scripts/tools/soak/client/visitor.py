"""A client of another user: sends some requests, and tells how many were answered rightly and how many refused."""

from __future__ import annotations

import argparse
import os
import random
import sys
from typing import Final

from shm_backend_utils.client import PathUnavailableError, ShmClient
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.errors import ShmError

from .models import MODELS, Noise, Said, is_right
from .process import Tally

REQUESTS: Final = 20
TIMEOUT_S: Final = 15.0


def visit(urls: list[str], seed: int, tally: Tally) -> None:
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


def main() -> int:
    """Run the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("urls", nargs="+")
    arguments = parser.parse_args()
    visit(arguments.urls, arguments.seed, Tally())  # all that is imported late is read while this user may read it
    os.setgroups([])
    os.setgid(arguments.uid)
    os.setuid(arguments.uid)
    tally = Tally()
    try:
        visit(arguments.urls, arguments.seed, tally)
    except ShmError as error:
        tally.add_error(error)
    print(tally.take(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
