"""Have PyTorch turn the scores of 21 classes into probabilities, pixel by pixel, in shared memory."""

from __future__ import annotations

import sys

import numpy as np

from shm_backend_utils.client import ShmClient

SHAPE = (21, 512, 512)  # classes, height, width


def main(url: str) -> None:
    """Ask for the probabilities of one picture's pixels."""
    with ShmClient(url) as client, client.prepare("probabilities", {"LOGITS": (SHAPE, np.float32)}) as call:
        np.random.default_rng(0).standard_normal(SHAPE, np.float32, out=call.inputs["LOGITS"])
        with call.infer() as result:
            pixel = result["PROBABILITIES"][:, 0, 0]
            print(f"path {result.path}: class {pixel.argmax()} with {pixel.max():.0%}, all together {pixel.sum():.0%}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001")
