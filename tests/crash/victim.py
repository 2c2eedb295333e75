"""A client that goes as far as it is told, says so, and stays there until it is killed."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn, cast

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory import segment, shared_file
from shm_backend_utils.memory.pool.options import RegionName

LENGTH = 1 << 16


def stay() -> NoReturn:
    print("here", flush=True)
    sys.stdin.read()  # ends, too, if the test does
    sys.exit("nobody killed me")


def allocate_and_stay(*arguments: Any) -> None:
    """Make a sealed region halfway: its memory is taken, and nobody knows of it yet."""
    shared_file.allocate(*arguments)
    stay()


def read(client: ShmClient, stage: str) -> NoReturn:
    """Read a stream that has no end, and keep of it what the stage says."""
    results = client.stream("frames_of", {"X": np.ones(1000, np.float32)}, outputs={"Y": 4000}, path="direct")
    kept = [next(results)]
    if stage == "keeps everything":
        stay()
    print("here", flush=True)
    for result in results:
        kept[0].release()
        kept[0] = result
        del result
    sys.exit("the stream has ended")


def main(url: str, stage: str, parameters: dict[str, Any], region: RegionName) -> None:
    client = ShmClient(url, pool=PoolOptions(region=region, stream_guess_bytes=0))
    if stage.startswith("keeps "):
        read(client, stage)
    call = client.prepare(
        "crash_stages", {"X": ((LENGTH,), np.float32)}, outputs={"Y": 4 * LENGTH}, parameters=parameters
    )
    if stage == "created":
        stay()
    if stage == "in flight":
        print("here", flush=True)
        call.infer()
    call.inputs["X"][:] = 1
    result = call.infer()
    assert result["Y"][0] == 2
    if stage == "reading":
        stay()
    if stage == "making":
        vars(segment)["allocate"] = allocate_and_stay
        client.infer("crash_stages", {"X": np.ones(4 * LENGTH, np.float32)})
    if stage == "writing":
        call.inputs["X"][: LENGTH // 2] = 7
        stay()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), cast("RegionName", sys.argv[4]))
