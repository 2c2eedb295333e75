"""Each way to call a model, with an answer that is checked: of ``model_repository``'s identity, and of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from shm_backend_utils.client import ShmClient

Call = Callable[[ShmClient], bool]
"""Returns whether the answer was right."""

X: Final = np.arange(4096, dtype=np.float32)
IMAGE: Final = np.random.default_rng(1).integers(0, 255, (512, 256, 3), np.uint8)
TILE: Final = 256
LONG_S: Final = 20.0


def infer(client: ShmClient) -> bool:
    """Wait for the answer."""
    return np.array_equal(client.infer("identity", {"INPUT0": X})["OUTPUT0"], X)


def submit(client: ShmClient) -> bool:
    """Fetch the answer from a thread."""
    return np.array_equal(client.submit("identity", {"INPUT0": X}).result(LONG_S)["OUTPUT0"], X)


def prepare(client: ShmClient) -> bool:
    """Fill the memory in place."""
    with client.prepare("identity", {"INPUT0": (X.shape, X.dtype)}) as call:
        call.inputs["INPUT0"][...] = X
        return np.array_equal(call.infer()["OUTPUT0"], X)


def stream(client: ShmClient) -> bool:
    """Put the tiles of an image together again."""
    found = np.zeros_like(IMAGE)
    for result in client.stream("frames", {"IMAGE": IMAGE}):
        top, left = result["PLACE"]
        found[top : top + TILE, left : left + TILE] = result["TILE"]
    return np.array_equal(found, IMAGE)
