"""A client that reads a stream until it is killed; what it holds of it, the test says."""

from __future__ import annotations

import sys

import numpy as np

from shm_backend_utils.client import ShmClient


def main(url: str, keeps: str) -> None:
    client = ShmClient(url)
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
    main(sys.argv[1], sys.argv[2])
