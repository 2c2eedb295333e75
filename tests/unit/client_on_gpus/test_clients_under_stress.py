"""Answers whose GPU is still at work, under stress: each is right where it is read, on the stream that was named."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import Result, ShmClient
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.client_on_gpus.conftest import tensor_of
from tests.unit.client_on_gpus.gpu_server import GpuServer
from tests.unit.fake_gpu import stream_on
from tests.unit.gpus import switching_often

THREADS = 4
ANSWERS = 40
"""Of each thread."""
LATE_S = (0, 0, 0.0002, 0.001)
X = np.arange(600, dtype=np.float32)
ON_GPU = {"OUT0": (X.shape, X.dtype, "cuda:0")}
ON_HOST = {"OUT0": X.nbytes}


class Stress:
    """Threads with a stream and random calls each, of one client; what came in place of right answers is ``wrong``."""

    def __init__(self, driver: FakeDriver, server: GpuServer, client: ShmClient) -> None:
        self.wrong: list[object] = []
        self._driver = driver
        self._server = server
        self._client = client
        self._runtime: CudaRuntime = driver.runtime()

    def run(self, answers: int) -> None:
        """Have each thread get so many answers."""
        threads = [threading.Thread(target=self._ask, args=(seed, answers)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self, seed: int, answers: int) -> None:
        rng = random.Random(seed)
        try:
            with stream_on(self._runtime) as stream:
                left = answers
                while left > 0:
                    self._driver.delay(rng.choice(LATE_S))
                    self._server.work_s = rng.choice(LATE_S)
                    left -= self._ask_some(rng, stream)
        except BaseException as error:
            self.wrong.append(error)
            raise

    def _ask_some(self, rng: random.Random, stream: int) -> int:
        """Have one input doubled in one way; return how many answers came."""
        values = X + np.float32(rng.randrange(1, 1000))
        kind = rng.choice(("host", "device", "device", "pool"))
        outputs = rng.choice((ON_GPU, ON_GPU, ON_HOST))
        way = rng.choice(("infer", "submit", "prepare") if kind == "device" else ("infer", "submit"))
        x: Any = values
        if kind != "host":
            x = tensor_of(self._driver, np.zeros_like(X), rng.choice((0, 64)), kind=kind)
            x.write(values, stream)
            x.stream = None  # no library knows: that is what is named
        named = rng.choice((stream, stream, None))
        case = (way, kind, outputs is ON_GPU, named is None)
        if way == "prepare":
            with self._client.prepare("m", {"IN0": x}, outputs=outputs) as call:
                for number in range(2):
                    if number:
                        values = values + 1
                        x.write(values, stream)
                        x.stream = None
                    self._check(case, call.infer(stream=named), values, stream)
            return 2
        ask = getattr(self._client, way)("m", {"IN0": x}, outputs=outputs, stream=named)
        self._check(case, ask if way == "infer" else ask.result(), values, stream)
        return 1

    def _check(self, case: object, result: Result, values: npt.NDArray[np.float32], stream: int) -> None:
        found: Any = result["OUT0"]
        if not isinstance(found, np.ndarray):
            read: list[npt.NDArray[np.float32]] = []
            address = found.address
            self._driver.launch(stream, lambda: read.append(self._driver.memory(address, X.shape, X.dtype).copy()))
            del found
            result.release()  # it may be used again at once, behind what reads it on the stream
            self._runtime.synchronize_stream(stream, 0)
            (found,) = read
        if not np.array_equal(found, 2 * values):
            self.wrong.append((case, found[found != 2 * values][:3], 2 * values[found != 2 * values][:3]))


@pytest.mark.parametrize("answers_early", [True, False], ids=["by event", "when it is done"])
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_no_answer_is_wrong(driver: FakeDriver, server: GpuServer, client: ShmClient, answers_early: bool) -> None:
    server.answers_early = answers_early
    stress = Stress(driver, server, client)
    with switching_often():
        stress.run(ANSWERS)
    assert stress.wrong == []
