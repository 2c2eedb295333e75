"""A client that reads a stream until it is killed; the test says what it holds of it."""

from __future__ import annotations

import sys
from typing import cast

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.pool.options import RegionName


def main(url: str, region: RegionName, keeps: str) -> None:
    client = ShmClient(url, pool=PoolOptions(stream_guess_bytes=0, region=region))
    results = client.stream("frames_of", {"X": np.ones(1000, np.float32)}, outputs={"Y": 4000}, path="direct")
    kept = [next(results)]
    print("here", flush=True)
    if keeps == "everything":
        sys.stdin.read()  # ends, too, if the test does
        sys.exit("nobody killed me")
    for result in results:
        kept[0].release()
        kept[0] = result
        del result
    sys.exit("the stream has ended")


if __name__ == "__main__":
    main(sys.argv[1], cast("RegionName", sys.argv[2]), sys.argv[3])
