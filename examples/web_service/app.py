"""A web service: upload a photograph, and get the coins that a model sees in it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, HTTPException, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from shm_backend_utils.client import AsyncShmClient


class Coin(BaseModel):
    """Where a coin is in the photograph, and how large, in pixels."""

    left: int
    top: int
    width: int
    height: int
    pixels: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Have one client for all requests: its memory serves one after another."""
    async with AsyncShmClient(os.environ.get("TRITON_URL", "localhost:8001")) as client:
        app.state.triton = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/coins")
async def coins(request: Request, photograph: UploadFile) -> list[Coin]:
    """Return the coins in a photograph."""
    picture = await run_in_threadpool(decode, await photograph.read())
    if picture is None:
        raise HTTPException(415, "this is no picture that OpenCV can read")
    room = {"BOXES": ((100, 5), np.int32)}  # more than 100 coins come, too, but through Triton
    with await request.app.state.triton.infer("coins", {"PICTURE": picture}, outputs=room) as result:
        return [Coin(**dict(zip(Coin.model_fields, box, strict=True))) for box in result["BOXES"].tolist()]


def decode(file: bytes) -> npt.NDArray[Any] | None:
    """Return the picture in a file; None if there is none."""
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR) if file else None
