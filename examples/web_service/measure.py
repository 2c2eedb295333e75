"""Measure this recipe beside the same service with plain tritonclient and a stock model; both without a network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
from fastapi import FastAPI, Request, UploadFile
from fastapi.concurrency import run_in_threadpool

from examples.measuring import PLAIN, RECIPE, compare, report, served
from examples.web_service.app import Coin, app, decode

SIZE = (1080, 1920)


@asynccontextmanager
async def plain_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Have one client for all requests."""
    async with triton.InferenceServerClient(os.environ["TRITON_URL"]) as client:
        app.state.triton = client
        yield


plain_app = FastAPI(lifespan=plain_lifespan)


@plain_app.post("/coins")
async def plain_coins(request: Request, photograph: UploadFile) -> list[Coin]:
    """Return the coins in a photograph."""
    picture = await run_in_threadpool(decode, await photograph.read())
    assert picture is not None
    tensor = triton.InferInput("PICTURE", picture.shape, "UINT8")
    tensor.set_data_from_numpy(picture)
    result = await request.app.state.triton.infer("coins_stock", [tensor])
    return [Coin(**dict(zip(Coin.model_fields, box, strict=True))) for box in result.as_numpy("BOXES").tolist()]


def photograph_of_coins() -> bytes:
    """Return a drawing of four coins, as JPEG."""
    picture = np.full((*SIZE, 3), 40, np.uint8)
    for index in range(4):
        cv2.circle(picture, (200 + 400 * index, 500), 60 + 20 * index, (200, 200, 200), cv2.FILLED)
    return cv2.imencode(".jpg", picture)[1].tobytes()


async def upload(http: httpx.AsyncClient, file: bytes) -> npt.NDArray[Any]:
    """Return what the service answers, a row for each coin."""
    answer = await http.post("/coins", files={"photograph": file})
    return np.array([list(coin.values()) for coin in answer.raise_for_status().json()])


def measure(url: str, rounds: int) -> dict[str, float]:
    """Return the median of each way, in milliseconds."""
    os.environ["TRITON_URL"] = url
    file = photograph_of_coins()
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    async def open_service(service: FastAPI) -> httpx.AsyncClient:
        await stack.enter_async_context(service.router.lifespan_context(service))
        transport = httpx.ASGITransport(service)
        return await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://service"))

    try:
        services = {RECIPE: app, PLAIN: plain_app}
        clients = {name: loop.run_until_complete(open_service(service)) for name, service in services.items()}
        ways = {
            name: partial(lambda http: loop.run_until_complete(upload(http, file)), http)
            for name, http in clients.items()
        }
        return compare(ways, rounds)
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()


if __name__ == "__main__":
    with served(Path(__file__).parent) as url:
        report(measure(url, 30))
