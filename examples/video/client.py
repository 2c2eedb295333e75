"""Read a video, have a model find the edges in every frame, and get them in order. No frame is copied."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import PreparedCall, Result, ShmClient

AHEAD = 2  # one frame is read while the model has the other


def edges_of(video: Path, url: str) -> Iterator[npt.NDArray[Any]]:
    """Yield the edges of each frame of a video. Each array is valid until the next one is asked for."""
    source = cv2.VideoCapture(str(video))
    if not source.isOpened():
        raise FileNotFoundError(f"there is no video that OpenCV can read at {video}")
    height, width = int(source.get(cv2.CAP_PROP_FRAME_HEIGHT)), int(source.get(cv2.CAP_PROP_FRAME_WIDTH))
    frame = {"FRAME": ((height, width, 3), np.uint8)}
    room = {"EDGES": ((height, width), np.uint8)}
    with ShmClient(url) as client, ExitStack() as stack, ThreadPoolExecutor(AHEAD) as threads:
        idle = deque(stack.enter_context(client.prepare("edges", frame, outputs=room)) for _ in range(AHEAD))
        at_work: deque[tuple[PreparedCall, Future[Result]]] = deque()
        while True:
            while idle and source.read(idle[0].inputs["FRAME"])[0]:  # decoded into the memory that the model reads
                call = idle.popleft()
                at_work.append((call, threads.submit(call.infer)))
            if not at_work:
                return
            call, answer = at_work.popleft()
            yield answer.result()["EDGES"]
            idle.append(call)


def make_video(file: Path, size: tuple[int, int] = (1920, 1080), frames: int = 50) -> None:
    """Write a video: a square that moves to the right."""
    video = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 25, size)
    for index in range(frames):
        frame = np.zeros((size[1], size[0], 3), np.uint8)
        cv2.rectangle(frame, (8 * index, 16), (8 * index + 63, 79), (255, 255, 255), cv2.FILLED)
        video.write(frame)
    video.release()


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        make_video(Path(sys.argv[1]))
    for index, edges in enumerate(edges_of(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "localhost:8001")):
        print(f"frame {index}: the leftmost edge is in column {edges.any(axis=0).argmax()}")
