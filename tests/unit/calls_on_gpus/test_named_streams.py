"""Work of a model on streams: those that it names are waited for, or the whole GPU; also under stress."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession, StreamCall
from tests.unit.calls_on_gpus.device_calls import DEVICE, HOST, Client, session_on
from tests.unit.emulated import answers_to, message_of
from tests.unit.fake_gpu import DRIVER, MODEL, array_on, held_back, kernel, left_of, stream_on, wait_until
from tests.unit.gpus import DELAY_S, switching_often

ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"
LATE = 0.02


def fill(value: float) -> Any:
    def function(memory: npt.NDArray[Any]) -> None:
        memory.fill(value)

    return function


@pytest.fixture
def other(cuda: CudaRuntime) -> Iterator[int]:
    """Another stream of the instance's GPU."""
    with stream_on(cuda) as stream:
        yield stream


@pytest.fixture
def stream_of_other_gpu(cuda: CudaRuntime) -> Iterator[int]:
    with stream_on(cuda, 1) as stream:
        yield stream


# What is waited for


@pytest.mark.parametrize("wanted", [DEVICE, HOST], ids=["on a GPU", "on the host"])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_an_array_is_given_as_it_is_when_the_work_on_it_is_done(
    cuda: CudaRuntime, client: Client, session: ShmSession, stream: int, wanted: int, is_named: bool
) -> None:
    def infer(call: Call) -> None:
        y = array_on(cuda, [0] * 4)
        kernel(stream, fill(7), y, late_s=LATE)
        if is_named:
            call.ready_on(stream)
        call.put("Y", y)
        kernel(stream, fill(8), y)  # it is model.py's own again

    (response,) = session.serve([client.request(0, {"Y": wanted})], infer)
    assert response.error() is None
    assert client.output(0, "Y") == [7] * 4


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_the_clients_own_memory_is_written_when_the_response_leaves(
    client: Client, session: ShmSession, stream: int, is_named: bool
) -> None:
    def infer(call: Call) -> None:
        if is_named:
            call.ready_on(SimpleNamespace(__cuda_stream__=lambda: (0, stream)))
        kernel(stream, fill(7), call.output("Y", (4,), np.float32).array, late_s=LATE)

    (response,) = session.serve([client.request(0, {"Y": DEVICE})], infer)
    assert response.error() is None
    assert client.output(0, "Y") == [7] * 4


def test_what_is_on_other_streams_is_not_waited_for(
    cuda: CudaRuntime, client: Client, session: ShmSession, stream: int, other: int
) -> None:
    def infer(call: Call) -> None:
        call.ready_on(stream)
        y = array_on(cuda, [0] * 4)
        kernel(stream, fill(7), y, late_s=LATE)
        call.put("Y", y)

    with held_back(other):
        (response,) = session.serve([client.request(0, {"Y": DEVICE})], infer)
        assert response.error() is None
        assert client.output(0, "Y") == [7] * 4


def test_a_gpu_on_which_none_is_named_is_waited_for_as_a_whole(
    cuda: CudaRuntime, client: Client, session: ShmSession, stream: int, stream_of_other_gpu: int
) -> None:
    def infer(call: Call) -> None:
        call.ready_on(stream)
        with cuda.on(1):
            kernel(stream_of_other_gpu, fill(7), call.output("Z", (4,), np.float32).array, late_s=LATE)

    session.serve([client.request(0, {"Z": 1})], infer)
    assert client.output(0, "Z") == [7] * 4


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_a_copy_on_the_host_is_made_after_the_work(
    client: Client, session: ShmSession, stream: int, is_named: bool
) -> None:
    def infer(call: Call) -> None:
        y = call.device_output("Y", (4,), np.float32)
        if is_named:
            call.ready_on(stream)
        kernel(stream, fill(7), y.array, late_s=LATE)
        assert call.to_host(y).tolist() == [7] * 4

    (response,) = session.serve([client.request(0, {"Y": DEVICE})], infer)
    assert response.error() is None


def test_an_array_of_another_gpu_is_copied_after_the_work_there(
    cuda: CudaRuntime, client: Client, session: ShmSession, stream: int, stream_of_other_gpu: int
) -> None:
    def infer(call: Call) -> None:
        call.ready_on(stream)
        z = array_on(cuda, [0] * 4, 1)
        with cuda.on(1):
            kernel(stream_of_other_gpu, fill(7), z, late_s=LATE)
        call.put("Y", z)

    (response,) = session.serve([client.request(0, {"Y": DEVICE})], infer)
    assert response.error() is None
    assert client.output(0, "Y") == [7] * 4


# What is no stream to name


def refusal(session: ShmSession, request: Any, stream: Any) -> str:
    (response,) = session.serve([request], lambda call: call.ready_on(stream))
    return message_of(response)


def test_a_stream_of_a_gpu_that_the_call_does_not_use_is_refused(
    client: Client, session: ShmSession, stream_of_other_gpu: int
) -> None:
    said = refusal(session, client.request(0, {}), stream_of_other_gpu)
    assert said.startswith("shm:model: a stream of GPU 1 was named, but this call uses GPU 0, and its instance is on")
    assert client.is_over(0)


@contextlib.contextmanager
def captured(stream: int) -> Iterator[None]:
    bindings = DRIVER.bindings(MODEL)
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with bindings.context(DEVICE):
        assert bindings.cuStreamBeginCapture(stream, relaxed)[0] == 0
    yield
    with bindings.context(DEVICE):
        error, graph = bindings.cuStreamEndCapture(stream)
        assert error == 0
        bindings.cuGraphDestroy(graph)


def test_a_stream_in_capture_is_refused_and_its_capture_goes_on(
    client: Client, session: ShmSession, stream: int
) -> None:
    with captured(stream):
        said = refusal(session, client.request(0, {}), stream)
    assert "a stream of GPU 0 that was named is being captured into a graph" in said
    assert client.is_over(0)


def test_a_stream_whose_capture_begins_later_fails_the_call_and_no_other(
    client: Client, session: ShmSession, stream: int
) -> None:
    with contextlib.ExitStack() as capturing:

        def infer(call: Call) -> None:
            call.ready_on(stream)
            capturing.enter_context(captured(stream))

        (response,) = session.serve([client.request(0, {})], infer)
    assert "is being captured into a graph" in message_of(response)
    (response,) = session.serve([client.request(1, {})], lambda call: call.ready_on(stream))
    assert response.error() is None


@pytest.mark.parametrize("is_lent", [False, True], ids=["kept mapped", "lent"])
def test_memory_of_a_call_that_cannot_be_waited_for_is_not_given_back_while_its_gpu_is_at_work(
    cuda: CudaRuntime, client: Client, session: ShmSession, stream: int, is_lent: bool
) -> None:
    with contextlib.ExitStack() as capturing, stream_on(cuda) as other:
        with held_back(other) as finish:

            def infer(call: Call) -> None:
                call.ready_on(stream)
                call.ready_on(other)
                kernel(other, lambda y: y.fill(7), call.output("Y", (4,), np.float32).array)
                capturing.enter_context(captured(stream))

            (response,) = session.serve([client.request(0, {"Y": DEVICE}, is_for_one_request=is_lent)], infer)
            assert "is being captured into a graph" in message_of(response)
            record = client.region.record(0)
            assert (record.started, record.completed) == (1, 0), "the client would use the memory again"
            assert left_of(MODEL).opened == 2
            assert client.host.is_free(0) != is_lent
            finish.set()
        wait_until(lambda: client.floats(DEVICE, 512).tolist() == [7] * 4)
    if is_lent:
        wait_until(lambda: not session._open_context().resolver._cuda.collect())
        assert left_of(MODEL).opened == 0
        assert client.host.is_free(0)


def test_when_the_gpu_is_lost_calls_that_use_it_say_so_and_others_are_served(
    client: Client, session: ShmSession, stream: int
) -> None:
    def infer(call: Call) -> None:
        call.ready_on(stream)
        for function in ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventRecord"):
            DRIVER.fail_next(function, ILLEGAL, times=20, process=MODEL)

    (response,) = session.serve([client.request(0, {})], infer)
    assert f"failed with {ILLEGAL}: " in message_of(response)
    assert "a model must be loaded anew" in message_of(response)
    x = np.arange(4, dtype=np.float32)
    (response,) = session.serve(
        [client.host.request({"X": x}, {"Y": 16})], lambda call: call.put("Y", call.input("X").numpy() * 2)
    )
    assert response.error() is None
    DRIVER.forget()


# Threads


@pytest.mark.parametrize(("instance", "expected"), [(1, [1, 1]), (None, [None, None])])
def test_threads_of_an_instance_on_a_gpu_have_it_current(
    cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch, instance: int | None, expected: list[int | None]
) -> None:
    session = session_on(cuda, monkeypatch)
    session._is_on_gpu = instance is not None
    session._open_context().arrays.device = instance or 0
    together = threading.Barrier(2)
    found: list[int | None] = []

    def answer(call: StreamCall) -> None:
        together.wait(10)
        error, device = DRIVER.bindings(MODEL).cuCtxGetDevice()
        found.append(None if error else int(device))

    session.serve_streams([client.request(slot, {}) for slot in range(2)], answer)
    assert found == expected
    session.close()


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_a_stream_is_over_when_its_gpu_has_done_what_came_behind_the_last_response(
    client: Client, session: ShmSession, stream: int, is_named: bool
) -> None:
    done: list[float] = []

    def answer(call: StreamCall) -> None:
        if is_named:
            call.ready_on(stream)
        kernel(stream, lambda x: done.append(x.sum()), call.input("X").array, late_s=LATE)

    client.write(0, 3)
    session.serve_streams([client.request(0, {}, is_for_one_request=True)], answer)
    assert done == [12]
    assert client.is_over(0)
    assert left_of(MODEL).opened == 0


def test_a_stream_whose_gpu_cannot_be_waited_for_ends_by_that(client: Client, session: ShmSession, stream: int) -> None:
    def answer(call: StreamCall) -> None:
        call.ready_on(stream)
        call.input("X")
        DRIVER.fail_next("cuStreamSynchronize", ILLEGAL, times=2, process=MODEL)

    sent = client.request(0, {})
    session.serve_streams([sent], answer)
    (response,) = answers_to(sent).sent
    assert response is not None
    assert ILLEGAL in message_of(response)
    assert not client.is_over(0)
    assert client.host.is_free(0)


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
