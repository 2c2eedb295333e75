"""A client that is killed while it makes sealed memory, or between its requests. It says where it is."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory import sealed, shared_file

LENGTH = 1 << 16


def stay() -> None:
    print("here", flush=True)
    sys.stdin.read()  # ends, too, if the test does
    sys.exit("nobody killed me")


def stay_while_making() -> None:
    """Have the next region be made halfway: its memory is taken, and nobody knows of it yet."""

    def allocate(*arguments: Any) -> None:
        shared_file.allocate(*arguments)
        stay()

    vars(sealed)["allocate"] = allocate


def main(url: str, stage: str) -> None:
    client = ShmClient(url, pool=PoolOptions(region="sealed"))
    x = np.ones(LENGTH, np.float32)
    kept = client.infer("crash_stages", {"X": x}, outputs={"Y": x.nbytes})
    assert kept["Y"][0] == 2
    if stage == "making":
        stay_while_making()
        client.infer("crash_stages", {"X": np.tile(x, 4)}, outputs={"Y": 4 * x.nbytes})
    if stage == "idle":
        time.sleep(0.1)
        stay()


if __name__ == "__main__":
    main(*sys.argv[1:])
