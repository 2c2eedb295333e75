"""Stands for your application: has a batch computed every second, and says by which path it went.

Environment variables: TRITON_URL, as localhost:8001; REGION, as sealed, system or auto; POOL_BYTES, how much shared
memory it takes at most; GROUP_ID, of a group that may open it, where Triton runs as another user; CALLS, after how many
it ends, if ever.
"""

from __future__ import annotations

import itertools
import os
import time

import numpy as np

from shm_backend_utils.client import Access, PoolOptions, ServerUnavailableError, ShmClient


def main() -> None:
    """Call the model until stopped."""
    environment = os.environ
    group = environment.get("GROUP_ID")
    pool = PoolOptions(
        region=environment.get("REGION", "auto"),
        max_bytes=int(environment.get("POOL_BYTES", 2**28)),
        access=Access() if group is None else Access(mode=0o660, group_id=int(group)),
    )
    images = np.ones((8, 3, 224, 224), np.float32)
    with ShmClient(environment.get("TRITON_URL", "localhost:8001"), pool=pool) as client:
        while not is_ready(client):
            time.sleep(0.5)
        for number in itertools.count(1):
            with client.infer("multiply", {"INPUT0": images}) as result:
                right = bool((result["OUTPUT0"] == 2).all())
                print(f"call {number}: path {result.path}, {'right' if right else 'wrong'}", flush=True)
            if number == int(environment.get("CALLS", 0)):
                return
            time.sleep(1)


def is_ready(client: ShmClient) -> bool:
    """Return whether the model answers; the containers of a pod start in any order."""
    try:
        return client.is_model_ready("multiply")
    except ServerUnavailableError:
        return False


if __name__ == "__main__":
    main()
