"""The end of an execute: GPUs are waited for once, or left to the client by events; and an error is every call's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.memory.cuda.events import EventListener, EventRecorder
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaError
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.devices.arrays import DeviceArrays
from shm_backend_utils.model.modes.completion import complete
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel
from tests.unit.calls_on_gpus.device_calls import DEVICE, HOST, LONG_NAME, LONG_SHAPE, SHORTER_NAME, Client, session_on
from tests.unit.fake_gpu import that_nobody_loads
from tests.unit.fake_gpu_events import PATIENCE_S, wait_on_host

ON_GPU = {"Y": DEVICE, "Z": DEVICE}
ILLEGAL = "cudaErrorIllegalAddress"

Infer = Callable[[Call], None]


def noted(cuda: FakeCuda, *operations: str) -> list[str]:
    return [name for name, _ in cuda.log if name in operations]


# Completion by itself


class EndedCall:
    """As much of a call as a completion sees; it notes how often GPUs had been waited for when it was ended."""

    def __init__(self, cuda: FakeCuda, *devices: int, by_event: bool = False) -> None:
        self.devices = set(devices)
        self.can_end_by_event = by_event
        self.ends: list[tuple[Any, int]] = []
        self._cuda = cuda

    def end(self, events: Any = ()) -> None:
        self.ends.append(([event.device_uuid for event in events], len(noted(self._cuda, "synchronize"))))

    def fail(self, error: Exception) -> None:
        self.ends.append((error, len(noted(self._cuda, "synchronize"))))


def complete_all(access: CudaAccess, recorder: EventRecorder | None, *calls: Any) -> None:
    complete(calls, DeviceArrays(access, DEVICE), recorder)


def test_every_gpu_is_waited_for_once_and_then_every_call_ends(cuda: FakeCuda) -> None:
    calls = [EndedCall(cuda, *devices) for devices in ((0,), (0, 1), (1,), (1, 0))]
    complete_all(CudaAccess(lambda: cuda), None, *calls)
    assert [call.ends for call in calls] == [[([], 2)]] * 4


def test_without_calls_no_gpu_is_asked_for(cuda: FakeCuda) -> None:
    with that_nobody_loads(cuda) as access:
        complete_all(access, None)


def test_calls_that_may_end_by_event_do_and_the_others_are_waited_for(cuda: FakeCuda) -> None:
    later, now = EndedCall(cuda, 1, 0, by_event=True), EndedCall(cuda, 1)
    complete_all(CudaAccess(lambda: cuda), EventRecorder(cuda), later, now)
    assert later.ends == [([cuda.device_uuid(0), cuda.device_uuid(1)], 1)]
    assert now.ends == [([], 1)]


def test_where_all_calls_end_by_events_each_gpu_has_one_and_none_is_waited_for(cuda: FakeCuda) -> None:
    calls = [EndedCall(cuda, *devices, by_event=True) for devices in ((0,), (0, 1), (1,))]
    complete_all(CudaAccess(lambda: cuda), EventRecorder(cuda), *calls)
    zero, one = cuda.device_uuid(0), cuda.device_uuid(1)
    assert [call.ends for call in calls] == [[([zero], 0)], [([zero, one], 0)], [([one], 0)]]
    assert noted(cuda, "record") == ["record", "record"]


def test_without_a_recorder_every_call_is_waited_for(cuda: FakeCuda) -> None:
    call = EndedCall(cuda, 0, by_event=True)
    complete_all(CudaAccess(lambda: cuda), None, call)
    assert call.ends == [([], 1)]


@pytest.mark.parametrize("method", ["record", "export_event", "synchronize", "current_device"])
def test_what_the_device_fails_by_is_every_calls_error_and_is_not_raised(cuda: FakeCuda, method: str) -> None:
    calls = [EndedCall(cuda, 0, by_event=True), EndedCall(cuda, 1), EndedCall(cuda, 0, 1)]
    cuda.fail_next(method, ILLEGAL)
    complete_all(CudaAccess(lambda: cuda), EventRecorder(cuda), *calls)
    errors = [error for call in calls for error, _ in call.ends]
    assert [error.name for error in errors if isinstance(error, CudaError)] == [ILLEGAL] * 3


# In a session


@pytest.fixture
def session_with_events(cuda: FakeCuda, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    """A session that has served before: it begins with events when it has CUDA."""
    session = session_on(cuda, monkeypatch, gpu_events=True)
    session.serve([client.request(0, {})], lambda call: None)
    del cuda.log[:]
    yield session
    session.close()


def double(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    np.multiply(x, 2, out=y)


def fail(_: npt.NDArray[Any]) -> None:
    raise CudaError("a kernel", ILLEGAL)


def double_into(*names: str) -> Infer:
    def infer(call: Call) -> None:
        x = call.input("X").cupy()
        with call.stream:
            for name in names:
                shape = LONG_SHAPE if name in (SHORTER_NAME, LONG_NAME) else x.shape
                kernel(double, x, call.device_output(name, shape, x.dtype).cupy())

    return infer


def test_one_execute_waits_once_for_all_its_calls_and_tensors(
    cuda: FakeCuda, client: Client, session: ShmSession
) -> None:
    for slot in range(3):
        client.write(slot, slot + 1)
    responses = session.serve([client.request(slot, ON_GPU) for slot in range(3)], double_into("Y", "Z"))
    assert [response.error for response in responses] == [None] * 3
    assert noted(cuda, "synchronize") == ["synchronize"]
    for slot in range(3):
        assert client.output(slot, "Y") == client.output(slot, "Z") == [2 * slot + 2] * 4
        assert client.is_over(slot)


def test_no_call_is_over_before_the_gpu_was_waited_for(cuda: FakeCuda, client: Client, session: ShmSession) -> None:
    was_over: list[bool] = []

    def infer(call: Call) -> None:
        double_into("Y")(call)
        with call.stream:
            kernel(lambda _: was_over.append(any(client.is_over(slot) for slot in (0, 1))), call.input("X").cupy())

    session.serve([client.request(slot, {"Y": DEVICE}) for slot in (0, 1)], infer)
    assert was_over == [False, False]
    assert client.is_over(0)
    assert client.is_over(1)


def test_a_kernel_that_fails_is_told_in_a_response_of_every_call_in_flight(client: Client, session: ShmSession) -> None:
    served: list[Call] = []

    def infer(call: Call) -> None:
        served.append(call)
        double_into("Y")(call)
        if len(served) == 2:
            with call.stream:
                kernel(fail, call.input("X").cupy())

    responses = session.serve([client.request(slot, {"Y": DEVICE}) for slot in range(3)], infer)
    assert len({id(response) for response in responses}) == 3
    for slot, response in enumerate(responses):
        assert response.error.code == "UNAVAILABLE"
        assert f"a kernel failed with {ILLEGAL}" in str(response.error)
        assert not client.host.has_results(slot)
        assert client.is_over(slot)
    (response,) = session.serve([client.request(0, {"Y": DEVICE})], double_into("Y"))
    assert response.error is None


def test_a_call_that_raises_fails_alone_and_after_what_it_has_launched(
    cuda: FakeCuda, client: Client, session: ShmSession
) -> None:
    done: list[str] = []

    def infer(call: Call) -> None:
        double_into("Y")(call)
        if not done:
            with call.stream:
                kernel(lambda _: done.append("what was launched"), call.input("X").cupy())
            raise ModelError("this call gives up")

    client.write(1, 3)
    failed, served = session.serve([client.request(slot, {"Y": DEVICE}) for slot in (0, 1)], infer)
    assert str(failed.error) == "shm:model: this call gives up"
    assert done == ["what was launched"]
    assert served.error is None
    assert client.output(1, "Y") == [6] * 4


def test_a_call_outside_of_serve_is_over_when_the_gpu_is_done(client: Client, session: ShmSession) -> None:
    client.write(0, 3)
    with session.open(client.request(0, {"Y": DEVICE})) as call:
        double_into("Y")(call)
    assert client.output(0, "Y") == [6] * 4
    assert client.is_over(0)


# By events


@contextlib.contextmanager
def served_while_the_gpu_works(
    cuda: FakeCuda, client: Client, session: ShmSession, done: list[str]
) -> Iterator[threading.Event]:
    """Serve a request whose work takes until the event is set, at the latest until the end."""
    finish = threading.Event()

    def work(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
        assert finish.wait(PATIENCE_S)
        double(x, y)
        done.append("work")

    def infer(call: Call) -> None:
        x = call.input("X").cupy()
        with call.stream:
            kernel(work, x, call.device_output("Y", x.shape, x.dtype).cupy())

    (response,) = session.serve([client.request(0, {"Y": DEVICE})], infer)
    assert response.error is None
    try:
        yield finish
    finally:
        finish.set()
        cuda.current_stream().drain()


def test_a_response_leaves_while_the_gpu_works_and_the_client_waits_for_the_event(
    cuda: FakeCuda, client_cuda: FakeCuda, client: Client, session_with_events: ShmSession
) -> None:
    done: list[str] = []
    client.write(0, 21)
    with served_while_the_gpu_works(cuda, client, session_with_events, done) as finish:
        assert (done, noted(cuda, "synchronize"), client.is_over(0)) == ([], [], True)
        finish.set()
        wait_on_host(EventListener(client_cuda), client.events(0))
        assert client.output(0, "Y") == [42] * 4


def test_every_gpu_that_a_call_uses_has_an_event(
    cuda: FakeCuda, client_cuda: FakeCuda, client: Client, session_with_events: ShmSession
) -> None:
    session_with_events.serve([client.request(0, {"Y": DEVICE, "Z": 1})], double_into("Y", "Z"))
    assert [event.device_uuid for event in client.events(0)] == [cuda.device_uuid(device) for device in (0, 1)]
    wait_on_host(EventListener(client_cuda), client.events(0))


def test_the_next_execute_records_the_event_that_there_is(client: Client, session_with_events: ShmSession) -> None:
    for slot in (0, 1):
        session_with_events.serve([client.request(slot, {"Y": DEVICE})], double_into("Y"))
    assert client.events(0) == client.events(1)


CASES: dict[str, dict[str, Any]] = {
    "an output is on the host": {"outputs": {"Y": HOST}},
    "one of two outputs is on the host": {"outputs": {"Y": DEVICE, "Z": HOST}},
    "an output found no room": {"outputs": {"Y": DEVICE}, "room": 15},
    "the record has no room for events": {"outputs": {LONG_NAME: DEVICE}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_waits_where_the_client_could_not(
    cuda: FakeCuda, client: Client, session_with_events: ShmSession, case: str
) -> None:
    client.write(0, 21)
    outputs = CASES[case]["outputs"]
    (response,) = session_with_events.serve([client.request(0, **CASES[case])], double_into(*outputs))
    assert response.error is None
    assert client.events(0) == ()
    assert noted(cuda, "record") == []
    values = [array.tolist() for array in response.tensors.values()]
    values += [client.output(0, name) for name, place in client.places(0).items() if not place.is_in_response]
    assert values == [[42] * 4] * len(outputs)


def test_an_event_may_fill_the_record_to_its_last_byte(client: Client, session_with_events: ShmSession) -> None:
    session_with_events.serve([client.request(0, {SHORTER_NAME: DEVICE})], double_into(SHORTER_NAME))
    assert len(client.events(0)) == 1


def test_the_model_waits_for_a_call_without_a_slot_as_that_has_no_results(
    cuda: FakeCuda, client: Client, session_with_events: ShmSession
) -> None:
    client.write(1, 21)
    (response,) = session_with_events.serve([client.request(1, {"Y": DEVICE}, fenced=False)], double_into("Y"))
    assert response.error is None
    assert (noted(cuda, "record"), noted(cuda, "synchronize")) == ([], ["synchronize"])


def test_calls_of_one_execute_may_end_in_either_way(
    cuda: FakeCuda, client: Client, session_with_events: ShmSession
) -> None:
    requests = [client.request(0, {"Y": DEVICE}), client.request(1, {"Y": HOST}), client.request(2, {"Y": DEVICE})]
    session_with_events.serve(requests, double_into("Y"))
    assert [len(client.events(slot)) for slot in range(3)] == [1, 0, 1]
    assert client.events(0) == client.events(2)
    assert noted(cuda, "record", "synchronize") == ["record", "synchronize"]


def test_an_event_that_cannot_be_recorded_fails_the_call(
    cuda: FakeCuda, client: Client, session_with_events: ShmSession
) -> None:
    cuda.fail_next("record", ILLEGAL)
    (response,) = session_with_events.serve([client.request(0, {"Y": DEVICE})], double_into("Y"))
    assert response.error.code == "UNAVAILABLE"
    assert not client.host.has_results(0)
    assert client.is_over(0)


@pytest.mark.parametrize(
    "let_go",
    [lambda session: session._open_context().resolver.sweep(), lambda session: session.close()],
    ids=["looks after its mappings", "is closed"],
)
def test_memory_stays_mapped_while_the_gpu_writes_to_it_although_the_session(
    cuda: FakeCuda, client: Client, session_with_events: ShmSession, let_go: Callable[[ShmSession], None]
) -> None:
    done: list[str] = []
    with served_while_the_gpu_works(cuda, client, session_with_events, done) as finish:
        client.region.segment.unlink()
        letting_go = threading.Thread(target=let_go, args=(session_with_events,))
        letting_go.start()
        letting_go.join(0.3)  # it may wait for the GPU, or come back to it later
        assert has_users(client.region.segment.fileno()), "the client would free what the GPU writes to"
        finish.set()
        letting_go.join(PATIENCE_S)
    assert done == ["work"]


# Configured


def settings_with(value: str) -> Config:
    return Config.from_config({"parameters": {"SHM_GPU_EVENTS": {"string_value": value}}})


def test_events_are_asked_for_by_a_parameter() -> None:
    assert [settings_with(value).gpu_events for value in ("true", "false")] == [True, False]
    assert not Config.from_config({}).gpu_events


@pytest.mark.parametrize("value", ["", "yes", "1", "True", "on", "true "])
def test_another_word_is_refused_with_the_two_that_there_are(value: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_GPU_EVENTS is .*; expected true or false"):
        settings_with(value)
