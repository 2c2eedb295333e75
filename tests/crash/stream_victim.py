"""A client that reads a stream until it is killed; what it holds of it, and whether the stream grows, the test says."""

from __future__ import annotations

import sys
from typing import cast

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.pool.options import RegionName


def main(url: str, region: RegionName, keeps: str, grows: bool) -> None:
    client = ShmClient(url, pool=PoolOptions(stream_guess_bytes=0, region=region))
    room = ["Y"] if grows else {"Y": 4000}
    results = client.stream("frames_of", {"X": np.ones(1000, np.float32)}, outputs=room, path="direct")
    kept = [next(results)]
    while kept[0].overflowed:
        kept[0] = next(results)
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
    main(sys.argv[1], cast("RegionName", sys.argv[2]), sys.argv[3], "grows" in sys.argv)
