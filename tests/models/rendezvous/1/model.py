"""Y = X + the number of requests that were in the model at once: each waits until another one is there, too."""

import asyncio
import time

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served

PATIENCE_S = 10


class TritonPythonModel(Served):
    async def execute(self, requests):
        self.count = 0
        return await self.session.serve_async(requests, self.infer)

    async def infer(self, call: Call) -> None:
        self.count += 1
        deadline = time.monotonic() + PATIENCE_S
        while self.count < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        x = call.input("X")
        np.add(x.numpy(), self.count, out=call.output("Y", x.shape, x.dtype).numpy())
