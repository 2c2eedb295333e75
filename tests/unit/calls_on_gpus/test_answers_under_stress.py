"""Answers by events under stress: threads that change at any line, streams that are late at random, and failures.

Each slot has memory and events of its own, as real clients' slots do: an event stands for what one request has begun.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from tests.unit.calls_on_gpus.device_calls import DEVICE, HOST, Client, session_on
from tests.unit.fake_gpu import DRIVER, array_on, kernel, stream_on
from tests.unit.gpus import DELAY_S, switching_often

THREADS = 4
ANSWERS = 60
"""Of each thread."""
LATE_S = (0, 0, 0.0002, 0.001)
ENDS = ("kernel", "kernel", "put", "input", "host", "error")


class GivenUpError(BaseException):
    """What no model is expected to raise."""


@pytest.fixture
def clients(client_cuda: CudaRuntime) -> Iterator[list[Client]]:
    clients = [Client(client_cuda) for _ in range(THREADS)]
    yield clients
    for client in clients:
        client.close()


def double(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> None:
    np.multiply(x, 2, out=y)


class Stress:
    """Threads with a client, a stream and random calls each, of one session; what was wrong is told by :attr:`wrong`.

    Attributes
    ----------
    wrong : list
        What came in place of the right answer.
    by_event : int
        How many answers came while the GPU may have been at work.
    """

    def __init__(self, cuda: CudaRuntime, session: ShmSession, clients: list[Client]) -> None:
        self.wrong: list[object] = []
        self.by_event = 0
        self._cuda = cuda
        self._session = session
        self._clients = clients

    def run(self, answers: int) -> None:
        """Have each thread get so many answers."""
        threads = [threading.Thread(target=self._answer, args=(seed, answers)) for seed in range(len(self._clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _answer(self, seed: int, answers: int) -> None:
        rng = random.Random(seed)
        try:
            with stream_on(self._cuda) as stream:
                for _ in range(answers):
                    DRIVER.delay(rng.choice(LATE_S))
                    self._get_one(rng, self._clients[seed], stream)
        except BaseException as error:
            self.wrong.append(error)
            raise

    def _get_one(self, rng: random.Random, client: Client, stream: int) -> None:
        slot, value = 0, float(rng.randrange(1, 1000))
        end, is_named, where = rng.choice(ENDS), rng.random() < 0.8, rng.choice((DEVICE, DEVICE, HOST))
        client.write(slot, value)
        request = client.request(slot, {"Y": where}, is_for_one_request=rng.random() < 0.3)
        (response,) = self._session.serve([request], self._infer(end, stream, is_named, rng.choice(LATE_S)))
        case = (end, is_named, where)
        if not client.is_over(slot) or (response.error() is None) == (end == "error"):
            self.wrong.append((case, "is over", client.is_over(slot), response.error()))
        if response.error() is not None:
            return
        self.by_event += bool(client.events(slot))
        client.wait_for_events(slot)
        found, expected = client.output(slot, "Y"), [value if end == "input" else 2 * value] * 4
        if found != expected:
            self.wrong.append((case, found, expected, client.events(slot)))

    def _infer(self, end: str, stream: int, is_named: bool, late_s: float) -> Callable[[Call], None]:
        def infer(call: Call) -> None:
            if is_named:
                call.ready_on(stream)
            x = call.input("X")
            if end == "input":
                call.put("Y", x)
            elif end == "host":
                call.put("Y", call.to_host(x) * 2)
            elif end == "put":
                between = array_on(self._cuda, np.zeros(4))
                kernel(stream, double, x.array, between, late_s=late_s)
                call.put("Y", between)
            else:
                kernel(stream, double, x.array, call.device_output("Y", (4,), np.float32).array, late_s=late_s)
            if end == "error":
                raise GivenUpError

        return infer


def test_no_answer_is_wrong(cuda: CudaRuntime, clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(session_on(cuda, monkeypatch, gpu_events=True)) as session, switching_often():
        stress = Stress(cuda, session, clients)
        stress.run(ANSWERS)
    DRIVER.delay(DELAY_S)
    assert stress.wrong == []
    assert stress.by_event > THREADS
