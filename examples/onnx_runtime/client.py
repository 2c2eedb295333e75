"""Have a picture sharpened by ONNX Runtime, in the memory in which it is drawn."""

from __future__ import annotations

import sys

import numpy as np

from shm_backend_utils.client import ShmClient

SHAPE = (1, 3, 1080, 1920)


def main(url: str) -> None:
    """Sharpen one picture."""
    with ShmClient(url) as client, client.prepare("sharpen", {"PICTURE": (SHAPE, np.float32)}) as call:
        picture = call.inputs["PICTURE"]
        picture[...] = 0.25
        picture[..., 500:580, 900:1020] = 0.75
        with call.infer() as result:
            sharpened = result["SHARPENED"]
            print(
                f"path {result.path}: {picture.min()} to {picture.max()} became {sharpened.min()} to {sharpened.max()}"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001")
