"""What a client tells of itself: figures when asked, and nothing otherwise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from .flavours import Flavour

X = np.ones(1000, np.float32)

EVERYTHING_ONCE = """
import asyncio, sys
import numpy as np
from shm_backend_utils.client import AsyncShmClient, InferenceError, ShmClient

url = sys.argv[1]
x = np.ones((9, 4), np.float32)
with ShmClient(url) as client:
    for path in ("direct", "triton-shm", "inline"):
        client.infer("rows", {"X": x}, split=True, path=path).release()
        client.submit("rows", {"X": x[:2]}, path=path).result().release()
        try:
            client.infer("rows", {"X": -x}, split=True, path=path)
        except InferenceError:
            pass
    client.explain("unaware")

async def main():
    async with AsyncShmClient(url) as client:
        for path in ("direct", "triton-shm", "inline"):
            (await client.infer("rows", {"X": x}, split=True, path=path)).release()

asyncio.run(main())
"""


def test_a_program_that_sets_up_no_logging_sees_none(flavour: Flavour) -> None:
    program = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", EVERYTHING_ONCE, flavour.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (program.returncode, program.stdout, program.stderr) == (0, "", "")
