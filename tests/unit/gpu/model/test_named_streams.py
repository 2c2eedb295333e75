"""Work of a model on streams: those that it names are waited for, or the whole GPU; also under stress."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call, StreamCall
from tests.unit.emulated import answers_to, error_of, message_of
from tests.unit.gpu.fakes import (
    DRIVER,
    MODEL,
    OwnedStream,
    array_on,
    captured,
    held_back,
    kernel,
    left_of,
    stream_on,
    wait_until,
)
from tests.unit.gpu.model.conftest import DEVICE, HOST, Calls, Client, calls_of
from tests.unit.side_by_side import side_by_side

ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"
LATE = 0.02
named_or_not = pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])


def fill(stream: int, array: Any, value: float = 7) -> None:
    kernel(stream, lambda memory: memory.fill(value), array, late_s=LATE)


@pytest.fixture
def other(cuda: CudaRuntime) -> Iterator[int]:
    with stream_on(cuda) as stream:
        yield stream


@pytest.fixture
def on_other_gpu(cuda: CudaRuntime) -> Iterator[int]:
    with stream_on(cuda, 1) as stream:
        yield stream


# What is waited for


@pytest.mark.parametrize("wanted", [DEVICE, HOST], ids=["on a GPU", "on the host"])
@named_or_not
def test_an_array_is_given_as_it_is_when_the_work_on_it_is_done(calls: Calls, wanted: int, is_named: bool) -> None:
    def infer(call: Call) -> None:
        y = array_on(calls.cuda, [0] * 4)
        fill(calls.stream, y)
        if is_named:
            call.ready_on(calls.stream)
        call.put("Y", y)
        fill(calls.stream, y, 8)  # it is model.py's own again

    calls.serve(infer, {"Y": wanted})
    assert calls.client.output() == [7] * 4


def test_a_gpu_on_which_none_is_named_is_waited_for_as_a_whole(calls: Calls, on_other_gpu: int) -> None:
    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        y, array = call.output("Y", (4,), np.float32).array, array_on(calls.cuda, [0] * 4, 1)
        with calls.cuda.on(1):
            fill(on_other_gpu, array)
            fill(on_other_gpu, y)
        call.put("Z", array)

    calls.serve(infer, {"Y": 1, "Z": DEVICE})
    assert (calls.client.output(), calls.client.output(0, "Z")) == ([7] * 4, [7] * 4)


def test_a_named_stream_lives_until_its_work_is_done(calls: Calls) -> None:
    def infer(call: Call) -> None:
        own, y = OwnedStream(calls.cuda), array_on(calls.cuda, [0] * 4)
        call.ready_on(own)
        fill(own.handle, y)
        call.put("Y", y)

    calls.serve(infer, {"Y": DEVICE})
    assert calls.client.output() == [7] * 4


# What cannot be waited for


def test_a_stream_of_a_gpu_that_the_call_does_not_use_is_refused(calls: Calls, on_other_gpu: int) -> None:
    said = calls.refusal(lambda call: call.ready_on(on_other_gpu))
    assert said.startswith("shm:model: a stream of GPU 1 was named, but this call uses GPU 0, and its instance is on")
    assert calls.client.is_over()


def test_a_stream_in_capture_is_refused_and_its_capture_goes_on(calls: Calls) -> None:
    with captured(calls.stream):
        said = calls.refusal(lambda call: call.ready_on(calls.stream))
    assert "a stream of GPU 0 that was named is being captured into a graph" in said
    assert calls.client.is_over()
    calls.serve(lambda call: call.ready_on(calls.stream), slot=1)


@pytest.mark.parametrize("is_lent", [False, True], ids=["kept mapped", "lent"])
def test_memory_of_a_call_in_capture_stays_until_its_gpu_is_done(calls: Calls, other: int, is_lent: bool) -> None:
    client = calls.client
    with contextlib.ExitStack() as capturing:
        with held_back(other) as finish:

            def infer(call: Call) -> None:
                call.ready_on(calls.stream)
                call.ready_on(other)
                kernel(other, lambda y: y.fill(7), call.output("Y", (4,), np.float32).array)
                capturing.enter_context(captured(calls.stream))

            assert "being captured into a graph" in calls.refusal(infer, {"Y": DEVICE}, is_for_one_request=is_lent)
            record = client.region.record(0)
            assert (record.started, record.completed) == (1, 0), "the client would use the memory again"
            assert left_of(MODEL).opened == 2
            assert client.host.is_free(0) != is_lent
            finish.set()
        wait_until(lambda: client.floats(DEVICE, 512).tolist() == [7] * 4)
    calls.serve(lambda call: call.ready_on(calls.stream), slot=1, is_for_one_request=is_lent)
    if is_lent:
        calls.collect()
        assert left_of(MODEL).opened == 0
        assert client.host.is_free(0)


def test_when_the_gpu_is_lost_calls_that_use_it_say_so_and_others_are_served(calls: Calls) -> None:
    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        for function in ("cuEventSynchronize", "cuCtxSynchronize", "cuEventRecord"):
            DRIVER.fail_next(function, ILLEGAL, times=20, process=MODEL)

    said = calls.refusal(infer)
    assert f"failed with {ILLEGAL}: " in said
    assert "restart it, or load the model again" in said
    on_host = calls.client.host.request({"X": np.ones(4, np.float32)}, {"Y": 16})
    assert error_of(calls.session, on_host, lambda call: call.put("Y", call.input("X").numpy() * 2)) == ""
    DRIVER.forget()


@pytest.mark.parametrize(("instance", "expected"), [(1, [1, 1]), (None, [None, None])])
def test_threads_are_on_the_instances_gpu(calls: Calls, instance: int | None, expected: list[int | None]) -> None:
    calls.session._is_on_gpu = instance is not None
    calls.session._open_context().arrays.device = instance or 0
    together = threading.Barrier(2)
    found: list[int | None] = []

    def answer(call: StreamCall) -> None:
        together.wait(10)
        error, device = DRIVER.bindings(MODEL).cuCtxGetDevice()
        found.append(None if error else int(device))

    calls.session.serve_streams([calls.client.request(slot, {}) for slot in range(2)], answer)
    assert found == expected


@named_or_not
def test_responses_and_the_end_of_a_stream_come_after_what_was_launched_before(calls: Calls, is_named: bool) -> None:
    done: list[float] = []

    def answer(call: StreamCall) -> Iterator[None]:
        if is_named:
            call.ready_on(calls.stream)
        for number in range(3):
            kernel(calls.stream, lambda x: done.append(x.sum()), call.input("X").array, late_s=LATE)
            if number < 2:
                yield
                assert done == [12] * (number + 1)

    calls.client.write(0, 3)
    request = calls.client.request(0, {}, is_for_one_request=True)
    calls.session.serve_streams([request], answer)
    assert [each and each.error() for each in answers_to(request).sent] == [None] * 3
    assert done == [12] * 3
    assert calls.client.is_over()
    assert left_of(MODEL).opened == 0


def test_a_stream_whose_gpu_cannot_be_waited_for_ends_by_that(calls: Calls) -> None:
    def answer(call: StreamCall) -> None:
        call.ready_on(calls.stream)
        call.input("X")
        DRIVER.fail_next("cuEventSynchronize", ILLEGAL, times=2, process=MODEL)

    sent = calls.client.request(0, {})
    calls.session.serve_streams([sent], answer)
    (response,) = answers_to(sent).sent
    assert ILLEGAL in message_of(response)
    assert not calls.client.is_over()
    assert calls.client.host.is_free(0)


THREADS = 4
ANSWERS = 60
"""Of each thread."""
LATE_S = (0, 0, 0.0002, 0.001)
ENDS = ("kernel", "kernel", "put", "input", "host", "error")


class GivenUpError(BaseException):
    """What no model is expected to raise."""


def double(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> None:
    np.multiply(x, 2, out=y)


class Stress:
    """Threads with a client, a stream and random calls each, of one session; ``early`` counts early answers."""

    def __init__(self) -> None:
        self.wrong: list[object] = []
        self.early = 0

    def answer(self, calls: Calls, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(ANSWERS):
            DRIVER.delay(rng.choice(LATE_S))
            self._get_one(calls, rng)

    def _get_one(self, calls: Calls, rng: random.Random) -> None:
        client, value = calls.client, float(rng.randrange(1, 1000))
        end, is_named, where = rng.choice(ENDS), rng.random() < 0.8, rng.choice((DEVICE, DEVICE, HOST))
        client.write(0, value)
        infer = _infer(calls, end, is_named, rng.choice(LATE_S))
        error = calls.response(infer, {"Y": where}, is_for_one_request=rng.random() < 0.3).error()
        case = (end, is_named, where)
        is_over = client.is_over() or bool(client.events())
        if not is_over or (error is None) == (end == "error"):
            self.wrong.append((case, "is over", is_over, error))
        if error is not None:
            return
        self.early += bool(client.events())
        client.wait_for_gpus()
        found, expected = client.output(), [value if end == "input" else 2 * value] * 4
        if found != expected:
            self.wrong.append((case, found, expected, client.events()))


def _infer(calls: Calls, end: str, is_named: bool, late_s: float) -> Callable[[Call], None]:
    def infer(call: Call) -> None:
        if is_named:
            call.ready_on(calls.stream)
        x = call.input("X")
        if end == "input":
            call.put("Y", x)
        elif end == "host":
            call.put("Y", call.to_host(x) * 2)
        elif end == "put":
            between = array_on(calls.cuda, np.zeros(4))
            kernel(calls.stream, double, x.array, between, late_s=late_s)
            call.put("Y", between)
        else:
            kernel(calls.stream, double, x.array, call.device_output("Y", (4,), np.float32).array, late_s=late_s)
        if end == "error":
            raise GivenUpError

    return infer


@pytest.mark.usefixtures("switching_often")
def test_no_answer_is_wrong(cuda: CudaRuntime, client_cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    stress = Stress()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(Client(client_cuda))) for _ in range(THREADS)]
        session = stack.enter_context(calls_of(cuda, clients[0], monkeypatch, gpu_events=True)).session
        calls = [Calls(cuda, client, session, stack.enter_context(stream_on(cuda))) for client in clients]
        side_by_side(*[functools.partial(stress.answer, each, seed) for seed, each in enumerate(calls)])
    assert stress.wrong == []
    assert stress.early > THREADS
