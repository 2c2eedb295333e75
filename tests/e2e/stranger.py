"""A client that shares no /dev/shm with the server, as one in another container. Prints what it got, as JSON."""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from typing import Any, cast

import numpy as np

from shm_backend_utils.client import AsyncShmClient, Explanation, PathUnavailableError, PoolOptions, Result, ShmClient
from shm_backend_utils.memory.pool.options import RegionName

NOT_PERMITTED = 77
_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_INPUTS = {"X": np.arange(24, dtype=np.float32).reshape(6, 4)}


def leave_the_shared_memory() -> None:
    """Mount a /dev/shm of our own, which ends with this process."""
    libc = ctypes.CDLL(None)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=16m") != 0
    ):
        sys.exit(NOT_PERMITTED)


def blocking(url: str, pool: PoolOptions) -> tuple[Result, Explanation, str]:
    with ShmClient(url, pool=pool) as client:
        try:
            client.infer("rows", _INPUTS, path="triton-shm", split=True)
        except PathUnavailableError as error:
            refusal = str(error)
        return client.infer("rows", _INPUTS, outputs=["DOUBLED"], split=True), client.explain("rows"), refusal


async def in_tasks(url: str, pool: PoolOptions) -> tuple[Result, Explanation, str]:
    async with AsyncShmClient(url, pool=pool) as client:
        try:
            await client.infer("rows", _INPUTS, path="triton-shm", split=True)
        except PathUnavailableError as error:
            refusal = str(error)
        result = await client.infer("rows", _INPUTS, outputs=["DOUBLED"], split=True)
        return result, await client.explain("rows"), refusal


def main(url: str, is_aio: bool, region: RegionName) -> None:
    leave_the_shared_memory()
    pool = PoolOptions(region=region)
    result, explanation, refusal = asyncio.run(in_tasks(url, pool)) if is_aio else blocking(url, pool)
    told: dict[str, Any] = {
        "path": result.path,
        "doubled": result["DOUBLED"].tolist(),
        "expected": (_INPUTS["X"] * 2).tolist(),
        "reason": explanation.reason,
        "refusal": refusal,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "aio", cast("RegionName", sys.argv[3]))
