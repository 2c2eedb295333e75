"""A client in a container of a pod. It calls two models, and tells what came of it; each time it waits for a line."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import numpy as np

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.pool.options import RegionName

ROW_LENGTH = 2**20  # every float of a row is another one, and exact
IMAGES = 4, 3, 224, 224


def identity(client: ShmClient, row_count: int) -> None:
    """Have so many rows of 4 MiB passed on."""
    shape = (row_count * ROW_LENGTH,)
    with client.prepare("identity", {"INPUT0": (shape, np.float32)}, outputs={"OUTPUT0": 0}) as call:
        rows = call.inputs["INPUT0"].reshape(row_count, ROW_LENGTH)
        for number, row in enumerate(rows):
            row[:] = np.arange(number, number + ROW_LENGTH, dtype=np.float32)
        result = call.infer()
        output = result["OUTPUT0"]
        told: dict[str, Any] = {
            "path": result.path,
            "in place": bool(np.shares_memory(output, rows)),
            "right": all(
                (row == np.arange(number, number + ROW_LENGTH, dtype=np.float32)).all()
                for number, row in enumerate(output.reshape(rows.shape))
            ),
            "why": str(client.explain("identity")),
        }
        tell(told)


def multiply(client: ShmClient) -> None:
    """Have something computed, which the model cannot do without the inputs."""
    x = np.arange(np.prod(IMAGES), dtype=np.float32).reshape(IMAGES)
    with client.infer("multiply", {"INPUT0": x}) as result:
        tell({"path": result.path, "right": bool((result["OUTPUT0"] == 2 * x).all())})


def tell(what: object) -> None:
    """Say it, and wait until the test has looked at what is there now."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def main(url: str, region: str, row_count: int) -> None:
    with ShmClient(url, inline_bytes=0, pool=PoolOptions(region=cast("RegionName", region))) as client:
        multiply(client)
        identity(client, row_count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
