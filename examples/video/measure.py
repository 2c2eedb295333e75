"""Measure this recipe beside plain tritonclient and a stock model."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from examples.measuring import PLAIN, RECIPE, compare, plain_infer, report, served
from examples.video.client import AHEAD, edges_of, make_video

FRAMES = 50


def plain_edges_of(video: Path, url: str) -> Iterator[npt.NDArray[Any]]:
    """Yield the edges of each frame of a video, with as many frames under way as in the recipe."""
    source = cv2.VideoCapture(str(video))
    with triton.InferenceServerClient(url) as client, ThreadPoolExecutor(AHEAD) as threads:
        at_work: deque[Future[npt.NDArray[Any]]] = deque()
        is_over = False
        while True:
            while len(at_work) < AHEAD and not is_over:
                is_read, frame = source.read()
                is_over = not is_read
                if is_read:
                    at_work.append(threads.submit(plain_infer, client, "edges_stock", {"FRAME": frame}, "EDGES"))
            if not at_work:
                return
            yield at_work.popleft().result()


def sums(edges: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Use up a video's edges; return how many there are in each frame."""
    return np.array([np.count_nonzero(frame) for frame in edges])


def measure(url: str, rounds: int, frames: int = FRAMES) -> dict[str, float]:
    """Return the median of each way, in milliseconds for a frame."""
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "square.avi"
        make_video(video, frames=frames)
        ways = {RECIPE: lambda: sums(edges_of(video, url)), PLAIN: lambda: sums(plain_edges_of(video, url))}
        return {name: median / frames for name, median in compare(ways, rounds).items()}


if __name__ == "__main__":
    with served(Path(__file__).parent) as url:
        report(measure(url, 5), "ms for a frame")
