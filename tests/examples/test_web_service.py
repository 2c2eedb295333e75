"""The web service: photographs in, JSON out, with one client for all requests."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import cv2
import httpx
import numpy as np
import pytest

from examples.web_service.app import app
from examples.web_service.measure import photograph_of_coins

from .conftest import EXAMPLES


def answers(files: list[bytes]) -> list[httpx.Response]:
    """Upload files side by side, to a service that is started for them; return the answers."""

    async def upload() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://service") as http,
        ):
            posts = [http.post("/coins", files={"photograph": file}) for file in files]
            answers = await asyncio.gather(*posts)
            # An empty file, or one that is no picture, does not reach the model.
            assert app.state.triton.stats().paths.get("direct", 0) == sum(each.is_success for each in answers)
            return answers

    return asyncio.run(upload())


@pytest.fixture(autouse=True)
def _served(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_URL", url)


def picture(*coins: tuple[int, int, int]) -> bytes:
    """Return a drawing of coins, each with a center and a radius, without loss."""
    drawn = np.zeros((400, 600, 3), np.uint8)
    for left, top, radius in coins:
        cv2.circle(drawn, (left, top), radius, (255, 255, 255), cv2.FILLED)
    return cv2.imencode(".png", drawn)[1].tobytes()


def test_each_upload_gets_its_own_coins() -> None:
    one, two = answers([picture((100, 100, 20)), picture((300, 200, 30), (500, 300, 40))])
    assert [(coin["left"], coin["top"], coin["width"], coin["height"]) for coin in one.json()] == [(80, 80, 41, 41)]
    assert [(coin["left"], coin["top"], coin["width"]) for coin in two.json()] == [(270, 170, 61), (460, 260, 81)]


@pytest.mark.parametrize("file", [b"", b"no picture"])
def test_what_is_no_picture_is_refused(file: bytes) -> None:
    (answer,) = answers([file])
    assert answer.status_code == 415
    assert "no picture" in answer.json()["detail"]


def test_the_coins_of_a_photograph_are_found() -> None:
    assert len(answers([photograph_of_coins()])[0].json()) == 4


def test_uvicorn_serves_it(url: str) -> None:
    command = [sys.executable, "-m", "uvicorn", "examples.web_service.app:app", "--port", "0"]
    with subprocess.Popen(command, cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
            answer = httpx.post(f"{address}/coins", files={"photograph": picture((100, 100, 20))}, trust_env=False)
            assert [coin["left"] for coin in answer.json()] == [80]
        finally:
            server.terminate()
